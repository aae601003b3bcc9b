"""A device besides the CPU, without its hardware; a script on it does what it would do on a GPU.

    python simulated_device.py SCRIPT DEVICE FLAGS OF THE SCRIPT

Its tensors are computed by the CPU, with the CPU's random numbers. So a run there and one on the
CPU are the same bit for bit (an LSTM is rounded differently). But they are tensors of another
device: an operation refuses those of both, where CUDA does, and only what is copied to the CPU
becomes an array of NumPy. The script trains for 16 steps, is resumed, ends, and evaluates; a
changed one is taken from the folder. What this cannot show is what a GPU computes differently, nor
its memory, streams and graphs.
"""

import functools
import sys
from pathlib import Path

import torch
from conftest import load_script
from torch._decomp.decompositions import gru_impl, lstm_impl
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

NAME = "simulated"
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
LISTS = {aten.cat.default, aten.stack.default}  # take no number from the CPU either
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
LIBRARIES = []  # what is registered, for as long as they live


class SimulatedTensor(torch.Tensor):
    """Looks to PyTorch as if it were elsewhere; `there` is what it holds, a tensor of the CPU."""

    @staticmethod
    def __new__(cls, there: torch.Tensor):
        layout = {"strides": there.stride(), "storage_offset": there.storage_offset()}
        layout |= {"dtype": there.dtype, "device": torch.device(NAME, 0)}
        return torch.Tensor._make_wrapper_subclass(cls, there.shape, **layout)

    def __init__(self, there: torch.Tensor):
        self.there = there

    def tolist(self) -> list:
        return self.there.tolist()

    def __reduce_ex__(self, protocol):  # checkpoints are loaded to the CPU
        return self.there.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, *args, **(kwargs or {}))


def check_same_device(operation, args: tuple, tensors: list) -> None:
    """Raise what CUDA would: a number from the CPU is taken, and so are indices, nothing else."""
    if operation in COPIES:
        return
    if operation in INDEXED and isinstance(args[0], SimulatedTensor):
        tensors = [args[0], *args[2:3]]
    scalars = operation not in LISTS
    others = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, SimulatedTensor) and not (scalars and tensor.dim() == 0)
    ]
    if others and len(others) < len(tensors):
        raise RuntimeError(f"{operation}: tensors of the CPU and of the {NAME} device")


def compute(operation, *args, **kwargs):
    """Let the CPU compute an operation, and put its result where it belongs."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    check_same_device(operation, args, tensors)
    here = any(isinstance(tensor, SimulatedTensor) for tensor in tensors)
    there = here
    if (device := kwargs.get("device")) is not None:
        there = device.type == NAME
    elif operation is aten.copy_.default:
        there = isinstance(args[0], SimulatedTensor)
    leaves = [leaf.there if isinstance(leaf, SimulatedTensor) else leaf for leaf in leaves]
    leaves = [torch.device("cpu") if isinstance(leaf, torch.device) else leaf for leaf in leaves]
    cpu_args, cpu_kwargs = pytree.tree_unflatten(leaves, spec)
    out = operation(*cpu_args, **cpu_kwargs)
    if there:
        out = pytree.tree_map_only(torch.Tensor, SimulatedTensor, out)
    return return_and_correct_aliasing(operation, args, kwargs, out) if here else out


def in_bfloat16(operation):
    """What autocast does to a convolution or a linear layer."""

    def cast(*args):
        args = [arg.bfloat16() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with torch.autocast(NAME, enabled=False):
            return operation(*args)

    return cast


class Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list:
        return [torch.bfloat16]


def set_up() -> None:
    """Make the device known to this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(compute, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    for operation in (aten.conv2d.default, aten.linear.default):
        some.impl(operation, in_bfloat16(operation), "AutocastPrivateUse1")
    for operation in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        # otherwise a tensor of size 0 is made and resized, which ours cannot be
        some.impl(operation, functools.partial(compute, operation), "PrivateUse1")
    # in small steps, which round otherwise: one big step there is for real devices only
    some.impl("gru.input", gru_impl, "AutogradPrivateUse1")
    some.impl("lstm.input", lstm_impl, "AutogradPrivateUse1")
    LIBRARIES.extend((everything, some))
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # as a tensor's data is not
    torch.inference_mode = torch.no_grad  # which knows no tensors like these


if __name__ == "__main__":
    name, device, *flags = sys.argv[1:]
    if device == NAME:
        set_up()
    changed = Path(f"{name}.py")
    script = load_script(name, changed.read_text() if changed.exists() else None)
    script.AUTO_DEVICES = (device,)
    flags += ["--stop-at", "16"]
    for argv in (flags, ["--resume", "run"]):  # the second goes to the end, and evaluates
        script.train(script.parse(argv))
