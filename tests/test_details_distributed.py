"""The behavioural test of the detail that only several processes can show."""

import gc
import multiprocessing
from types import ModuleType

import detail_probes
import torch
import torch._dynamo  # Adam asks for it: loaded once here, not in every process
import torch.distributed as dist
from detail_probes import LinearAgent, ScriptedEnvs, watch
from test_details import assert_close, shown_by
from torch import nn


def play(script: ModuleType, rank: int, max_grad_norm: float, folder) -> None:
    """Train for one iteration as one of two processes, and write down what was seen."""

    class RankAgent(LinearAgent):
        """Another one in each process, until the weights are sent."""

        def __init__(self, envs, args):
            super().__init__(envs, args)
            nn.init.constant_(self.critic.bias, rank)

    script.RANK, script.WORLD_SIZE = rank, 2
    script.check_equal = lambda agent: None  # the test looks for itself
    detail_probes.LinearAgent = RankAgent
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    envs = ScriptedEnvs(script, 2)  # both see the same, ...
    envs.rewards = envs.rewards * (1 + rank) + 2 * rank  # ... and earn something else
    changes = {"num_envs": 4, "total_timesteps": 32, "seed": 5, "max_grad_norm": max_grad_norm}
    seen = watch(script, folder, envs=envs, **changes)
    story = {"seeds": envs.reset_seeds, "actions": seen.rollouts[0].actions}
    story["advantages"] = seen.rollouts[0].advantages.flatten()
    story["minibatches"] = [vars(minibatch) for minibatch in seen.minibatches]
    torch.save(story, folder / f"rank-{rank}.pt")


def stories_of_two(script: ModuleType, max_grad_norm: float, folder) -> list[dict]:
    """What each of two processes saw."""
    # forked, so that they have this script, mutated or not, and need not import torch again
    fork, args = multiprocessing.get_context("fork"), (max_grad_norm, folder)
    processes = [fork.Process(target=play, args=(script, rank, *args)) for rank in (0, 1)]
    folder.mkdir()
    # what other tests left is not theirs to collect: an EnvPool would wait for threads it has lost
    gc.collect()
    gc.freeze()
    for process in processes:
        process.start()
    gc.unfreeze()
    for process in processes:
        process.join(60)
        process.kill()  # one that hangs
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process has crashed: no assertion has seen what is wrong")
    return [torch.load(folder / f"rank-{k}.pt", weights_only=False) for k in (0, 1)]


@shown_by("aux 2")
def test_aux_02_parallelized_gradient_update(script, tmp_path):
    check(stories_of_two(script, 1e9, tmp_path / "whole"), 1e9)
    check(stories_of_two(script, 0.05, tmp_path / "clipped"), 0.05)  # every gradient is cut


def check(stories: list[dict], max_grad_norm: float) -> None:
    # other environments in each process, and other actions where the observations are the same
    assert [story["seeds"] for story in stories] == [[5], [7]]
    assert not torch.equal(stories[0]["actions"], stories[1]["actions"])

    minibatches = list(zip(*(story["minibatches"] for story in stories), strict=True))
    assert len(minibatches) == 4
    for mine, theirs in minibatches:
        mean = {name: (mine["raw"][name] + theirs["raw"][name]) / 2 for name in mine["raw"]}
        norm = torch.cat([gradient.flatten() for gradient in mean.values()]).norm()
        assert norm > 0.1
        length = min(1, max_grad_norm / norm)
        for name in mean:
            assert torch.equal(mine["before"][name], theirs["before"][name])
            assert torch.equal(mine["after"][name], theirs["after"][name])
            for applied in (mine["applied"], theirs["applied"]):
                assert_close(applied[name], mean[name] * length)

    # normalized by the mean and the deviation of what both processes have of the minibatch
    advantages = [
        story["advantages"][minibatch["rows"]]
        for story, minibatch in zip(stories, minibatches[0], strict=True)
    ]
    whole = torch.cat(advantages)
    for own, minibatch in zip(advantages, minibatches[0], strict=True):
        normalized = (own - whole.mean()) / (whole.std(correction=0) + 1e-8)
        # at ratio 1, where the loss is the mean of -A * ratio
        assert_close(minibatch["gradients"]["logprob"], -normalized / len(own))
