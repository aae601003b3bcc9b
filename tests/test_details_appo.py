"""One behavioural test for each of the six details of asynchronous PPO.

The workers are generators that yield where they must wait: here they are driven by hand, in one
process, with scripted environments and an agent that says which weights it has.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, load_script
from detail_probes import ScriptedEnvs, watch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_details import assert_close, policy_gradient, shown_by
from torch import nn


class Teller(nn.Module):
    """An agent of two weights, a and b, each the version that was published; it tells both.

    As log-probability it says a, as value b; its state counts the steps since an episode began.
    """

    between = None  # called while weights are being copied: a is new, b is not

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.bf16 = False

    def of(self, version: int) -> "Teller":
        with torch.no_grad():
            self.a.fill_(version), self.b.fill_(version)
        return self

    def initial_state(self, num_envs):
        return torch.zeros(num_envs, 1)

    def load_state_dict(self, weights):
        with torch.no_grad():
            self.a.copy_(weights["a"])
            if Teller.between:
                Teller.between()
            self.b.copy_(weights["b"])

    def get_action_and_value(self, x, hidden, done):
        hidden = hidden * (1 - done[:, None]) + 1
        action = x.flatten(1)[:, 0].long() % 3
        ones = torch.ones(len(x))
        return action, self.a * ones, ones, self.b * ones, hidden


class Stage:
    """Workers that wait to be driven, in front of scripted environments."""

    def __init__(self, script, ends=(), **changes):
        sizes = {"num_workers": 1, "envs_per_worker": 2, "num_splits": 1, "num_steps": 4}
        sizes |= {"minibatch_size": 8, "serial": True, "device": "cpu", "seed": 5} | changes
        self.script, self.ends, self.args = script, ends, script.Args(**sizes)
        self.seeds, self.envs, self.rung = [], [], []
        self.shared = script.Shared(self.args, Teller(), (2, 3))
        self.shared.ring = self.rung.append
        self.x = self.shared.arrays()

    def make_envs(self, args, num_envs, seed, frozen=None):
        self.seeds.append(seed)
        self.envs.append(ScriptedEnvs(self.script, num_envs, self.ends))
        self.envs[-1].observations += len(self.envs)  # no two splits see the same
        return self.envs[-1], self.envs[-1].reset(seed=seed)[0]

    def publish(self, version: int):
        self.shared.publish(Teller().of(version), version)

    def times(self) -> list[int]:
        """Steps that the environments of each split have taken."""
        return [envs.time for envs in self.envs]

    def waiting(self) -> list[bool]:
        """Which splits wait for actions."""
        return (self.x.asked != self.x.answered).tolist()


@contextmanager
def stage(script, ends=(), **changes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Teller, "between", None)
        there = Stage(script, ends, **changes)
        patch.setattr(script, "make_envs", there.make_envs)
        yield there


def start(worker):
    """Let a generator go on up to where it waits; returns it."""
    next(worker)
    return worker


ENDS = [(1, 0, "terminated"), (3, 1, "truncated"), (6, 1, "both")]


@shown_by("appo 1")
def test_appo_01_trajectories_in_shared_memory(script):
    with stage(script, ENDS, num_workers=2) as there:
        shared, args, per_split = there.shared, there.args, there.args.slots_per_split
        workers = [start(script.rollout_worker(args, shared, i)) for i in range(2)]
        policy = script.policy_worker(args, shared, 0)
        done = np.zeros((65, 2), dtype=bool)
        done[1:] = there.envs[0].terminated | there.envs[0].truncated
        counts = np.zeros((66, 2))  # what the agent's state counts
        for t in range(65):
            counts[t + 1] = counts[t] * ~done[t] + 1
        for trajectory in range(per_split + 2):  # the first slots are used again
            while shared.filled.tolist() != [trajectory + 1] * 2:
                next(policy)
                for worker in workers:
                    next(worker)
            for split, envs in enumerate(there.envs):
                slot = split * per_split + trajectory % per_split
                steps = slice(4 * trajectory, 4 * trajectory + 4)
                rows = slice(4 * trajectory, 4 * trajectory + 5)  # one more, to bootstrap from
                assert np.array_equal(shared.obs[slot], envs.observations[rows])
                assert np.array_equal(shared.dones[slot], done[rows])
                assert_close(shared.rewards[slot, :4], envs.rewards[steps])
                assert np.array_equal(shared.actions[slot, :4], envs.actions[steps])
                said = envs.observations[steps, :, 0, 0].astype(int) % 3
                assert np.array_equal(shared.actions[slot, :4], said)
                assert np.array_equal(shared.hidden[slot, ..., 0], counts[rows])
                ended = done[1:][steps]
                assert np.array_equal(shared.episodes[slot, :4, :, 1] > 0, ended)
            shared.consumed += 1
        learner = len(workers) + 1
        assert set(there.rung) <= {0, 1, 2, -1, learner}, "its own bell for each member"

    # no part of it is anybody's own
    with stage(script) as there:
        there.shared.share()
        every = [x for x in vars(there.shared).values() if isinstance(x, torch.Tensor)]
        every += [x for agent in there.shared.weights for x in agent.parameters()]
        assert len(every) > 15 and all(tensor.is_shared() for tensor in every)
        for bell in there.shared.bells:
            bell.listener.close(), bell.rope.close()


@shown_by("appo 2")
def test_appo_02_double_buffered_sampling(script):
    with stage(script, num_splits=2, envs_per_worker=4, num_steps=8) as there:
        shared, args, x = there.shared, there.args, there.x
        worker = start(script.rollout_worker(args, shared, 0))
        # half of the environments each, one after the other in their seeds
        assert there.seeds == [5, 7] and [envs.num_envs for envs in there.envs] == [2, 2]
        assert there.waiting() == [True, True] and there.times() == [0, 0]
        # whoever has actions steps, and asks again, whatever the other waits for
        for split, times in ((0, [1, 0]), (0, [2, 0]), (1, [2, 1]), (0, [3, 1]), (1, [3, 2])):
            x.answered[split] = x.asked[split]
            next(worker)
            assert there.times() == times and there.waiting() == [True, True]
        next(worker)
        assert there.times() == [3, 2], "nobody steps without actions"

        # while the second is stepped, the first is waiting for its actions already
        seen, plain = [], there.envs[1].step
        there.envs[1].step = lambda actions: (seen.append(there.waiting()), plain(actions))[1]
        rung = len(there.rung)
        x.answered[:] = x.asked
        next(worker)
        assert seen == [[True, False]] and there.rung[rung:] == [1, 1]  # the policy worker's bell

        # the policy worker answers each split by itself
        policy = script.policy_worker(args, shared, 0)
        x.answered[1] = x.asked[1]
        next(policy)
        assert there.waiting() == [False, False] and there.rung[-1] == 0
    with stage(script, num_splits=1, envs_per_worker=4) as there:
        start(script.rollout_worker(there.args, there.shared, 0))
        assert [envs.num_envs for envs in there.envs] == [4]


@shown_by("appo 3")
def test_appo_03_newest_weights(script, tmp_path):
    def said(there, step):
        """The two weights and the version that came with this step."""
        told = (there.shared.logprobs, there.shared.values, there.shared.versions)
        (a, b, version) = ({*tensor[0, step].tolist()} for tensor in told)
        assert len(a) == len(b) == len(version) == 1
        assert a == b, "half of the weights are of another version"
        assert a == version, "not the version that it says"
        return a.pop()

    # before every forward pass, in the middle of a trajectory, too
    with stage(script) as there:
        worker = start(script.rollout_worker(there.args, there.shared, 0))
        policy = script.policy_worker(there.args, there.shared, 0)
        for step, version in enumerate((3, 3, 4, 7)):
            there.publish(version)
            next(policy), next(worker)
            assert said(there, step) == version

    # weights that are being written while they are read, and twice at that
    with stage(script) as there:
        start(script.rollout_worker(there.args, there.shared, 0))
        there.publish(3)

        def publish_twice():
            Teller.between = None
            there.publish(4), there.publish(5)

        Teller.between = publish_twice
        next(script.policy_worker(there.args, there.shared, 0))
        assert said(there, 0) == 5

    # who asks while the next weights are being written gets the last ones, whole
    for version in (4, 5):
        with stage(script) as there:
            start(script.rollout_worker(there.args, there.shared, 0))
            policy = script.policy_worker(there.args, there.shared, 0)
            there.publish(version - 1)

            def ask(policy=policy):
                Teller.between = None
                next(policy)

            Teller.between = ask
            there.publish(version)
            assert said(there, 0) == version - 1

    # training publishes after each update: the second rollout is that of the first one's result
    seen = watch(script, tmp_path, total_timesteps=32, learning_rate=0.1)
    for rollout in seen.rollouts:
        first = rollout.minibatches[0]
        assert_close(first.logprob, rollout.logprobs.flatten()[first.rows])


def doctored(script, tmp_path, doctor, **flags):
    """Train with trajectories that `doctor` changes before the learner looks at them."""

    class Team(script.Team):
        def wait(self):
            before = self.shared.filled.clone()
            super().wait()
            if (self.shared.filled > before).any():  # one split: its slots in turn
                doctor(self.shared, int(before[0]) % self.args.slots_per_split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Team", Team)
        return watch(script, tmp_path, **flags)


@shown_by("appo 4")
def test_appo_04_policy_lag(script, tmp_path):
    # the version stands with each step, not with the trajectory
    with stage(script) as there:
        worker = start(script.rollout_worker(there.args, there.shared, 0))
        policy = script.policy_worker(there.args, there.shared, 0)
        for version in (3, 4, 4, 9):
            there.publish(version)
            next(policy), next(worker)
        assert there.shared.versions[0, :4].T.tolist() == [[3, 4, 4, 9]] * 2

    # what is older than the limit has no part in any loss
    lags = torch.arange(16).view(8, 2) % 5

    def make_older(shared, slot):
        shared.versions[slot, :-1] = shared.version - lags
        shared.versions[slot, -1] = shared.version + 100  # behind the trajectory: nobody acted yet

    for limit in (2, 0, 4):
        flags = {"max_policy_lag": limit, "clip_vloss": False, "ent_coef": 0.3, "vf_coef": 1.0}
        flags |= {"norm_adv": False, "clip_coef": 0.2, "learning_rate": 0.1}
        seen = doctored(script, tmp_path, make_older, total_timesteps=32, **flags)
        for minibatch, sample in seen.samples():
            young = (lags.flatten() <= limit)[minibatch.rows]
            n = int(young.sum())
            assert n > 0 and (n < len(young) or limit == 4)
            outputs = (minibatch.logprob, sample.logprobs, sample.advantages)
            expected = policy_gradient(*(output[young] for output in outputs), 0.2)
            assert_close(minibatch.gradients["logprob"][young], expected)
            errors = (minibatch.value - sample.returns)[young]
            assert_close(minibatch.gradients["value"][young], errors / n, atol=1e-5)
            assert_close(minibatch.gradients["entropy"][young], torch.full((n,), -0.3 / n))
            for gradient in minibatch.gradients.values():
                assert not gradient[~young].any()
        for k in range(2):
            names = ("min", "mean", "max")
            logged = [seen.scalars[f"charts/policy_lag_{name}"][k][1] for name in names]
            assert logged == pytest.approx([0, lags.double().mean().item(), 4])

    # the oldest are learned from first, also if more end during an update than it takes: four
    # splits, which fill all of their 8 slots between two updates of one trajectory each
    teams, lag, publish = [], [], script.Shared.publish

    class BusyTeam(script.Team):
        def __init__(self, args, shared):
            super().__init__(args, shared)
            teams.append(self)

    def work_meanwhile(shared, agent, version):
        publish(shared, agent, version)
        for part in [*reversed(teams[0].parts)] * 40 if teams else ():
            next(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Team", BusyTeam)
        patch.setattr(script.Shared, "publish", work_meanwhile)
        patch.setattr(script, "log", lambda *words: lag.append(words[3]["charts/policy_lag_max"]))
        sizes = {"num_workers": 2, "envs_per_worker": 2, "num_splits": 2, "num_steps": 4}
        sizes |= {"minibatch_size": 4, "total_timesteps": 160, "eval_episodes": 0, "serial": True}
        run_dir = str(tmp_path / "busy")
        script.train(script.Args(env_id="toy_envs:ToyAtari-v0", run_dir=run_dir, **sizes))
    assert len(lag) == 40 and max(lag) == lag[-1] == 7

    # a lag that leaves nothing to learn from is an error
    def make_stale(lag):
        return lambda shared, slot: shared.versions[slot].fill_(int(shared.version) - lag)

    with pytest.raises(TimeoutError, match="all samples lag by more than"):
        doctored(script, tmp_path, make_stale(2), max_policy_lag=1)
    doctored(script, tmp_path, make_stale(2), max_policy_lag=2)

    # so is one that would grow without end: weights older than the newest when they were asked for
    with stage(script) as there:
        there.publish(3)
        worker = start(script.rollout_worker(there.args, there.shared, 0))
        there.publish(4)  # too late for those who have asked before
        policy = script.policy_worker(there.args, there.shared, 0)
        for version in (3, 4, 5):
            next(policy)
            there.shared.versions[:, :-1] = version
            next(worker)
        there.publish(6)
        next(policy)
        next(worker)
        next(policy)
        there.shared.versions[:, :-1] = 5
        with pytest.raises(TimeoutError, match="do not get new weights: 1 behind"):
            next(worker)


def vtrace_oracle(ratios, rewards, values, dones, next_value, next_done, *numbers):
    """Espeholt et al. 2018, equation 1 and remark 2: a sum over all steps behind each step."""
    gamma, gae_lambda, rho_bar, c_bar = numbers
    steps, num_envs = np.shape(rewards)
    targets = np.zeros((steps, num_envs))
    for i in range(num_envs):
        v = [*map(float, values[:, i]), float(next_value[i])]
        ends = [*(float(done) == 1 for done in dones[1:, i]), float(next_done[i]) == 1]
        for s in range(steps):
            targets[s, i] = v[s]
            for t in range(s, steps):
                weight = gamma ** (t - s)  # gamma^(t-s) * c_s * ... * c_{t-1}
                for j in range(s, t):
                    weight *= gae_lambda * min(c_bar, float(ratios[j, i])) * (not ends[j])
                behind = 0.0 if ends[t] else gamma * v[t + 1]
                error = float(rewards[t, i]) + behind - v[t]
                targets[s, i] += weight * min(rho_bar, float(ratios[t, i])) * error
    return targets


def off_policy(seed: int, steps: int = 12, num_envs: int = 5):
    """Trajectories whose ratios go from 0.01 to 100, with ends anywhere."""
    rng = torch.Generator().manual_seed(seed)
    draw = {"generator": rng, "dtype": torch.float64}
    ratios = 100.0 ** (2 * torch.rand(steps, num_envs, **draw) - 1)
    rewards, values = (3 * torch.randn(steps, num_envs, **draw) for _ in range(2))
    dones = (torch.rand(steps, num_envs, **draw) < 0.2).double()
    next_value, next_done = torch.randn(num_envs, **draw), torch.tensor([0.0, 1, 0, 0, 1]).double()
    return ratios, rewards, values, dones, next_value, next_done


@shown_by("appo 5")
def test_appo_05_vtrace(script, tmp_path):
    every = [(0.99, 0.95, 1.0, 1.0), (0.9, 1.0, 1.0, 1.0), (1.0, 0.5, 2.0, 0.7)]
    every += [(0.9, 0.8, 0.5, 3.0), (0.9, 0.0, 1.0, 1.0), (0.9, 0.9, 1e9, 1e9)]
    for seed, numbers in enumerate(every):
        drawn = off_policy(seed)
        before = [tensor.clone() for tensor in drawn]
        advantages, returns = script.compute_vtrace(*drawn, *numbers)
        expected = vtrace_oracle(*drawn, *numbers)
        assert_close(returns, expected, rtol=1e-9, atol=1e-9)
        assert_close(advantages, expected - drawn[2].numpy(), rtol=1e-9, atol=1e-9)
        assert all(map(torch.equal, drawn, before)), "the trajectories are left as they were"

    # training hands over what the learner says before its first step, and the true bootstrap
    rng = torch.Generator().manual_seed(3)
    noise, calls = torch.randn(8, 2, generator=rng), []

    def make_off_policy(shared, slot):
        shared.logprobs[slot, :-1] += noise
        shared.values[slot, :-1] += 5 * noise
        shared.logprobs[slot, -1] = shared.values[slot, -1] = torch.nan  # nobody acted yet

    plain = script.compute_vtrace

    def compute_vtrace(*args):
        calls.append(SimpleNamespace(args=args, answer=plain(*args)))
        return calls[-1].answer

    ends = [(3, 0, "terminated"), (5, 1, "truncated"), (7, 0, "both"), (15, 1, "terminated")]
    flags = {"total_timesteps": 32, "gamma": 0.9, "gae_lambda": 0.8, "learning_rate": 0.1}
    flags |= {"rho_bar": 0.7, "c_bar": 0.6, "clip_vloss": False, "vf_coef": 1.0, "ends": ends}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "compute_vtrace", compute_vtrace)
        seen = doctored(script, tmp_path, make_off_policy, **flags)
    assert len(calls) == len(seen.rollouts) == 2
    for k, (call, rollout) in enumerate(zip(calls, seen.rollouts, strict=True)):
        ratios, rewards, values, dones, next_value, next_done, *numbers = call.args
        assert numbers == [0.9, 0.8, 0.7, 0.6]
        assert_close(ratios, (-noise).exp())
        assert_close(rewards, seen.envs.rewards[8 * k : 8 * k + 8])
        assert_close(values, rollout.values)  # as the agent said them: not those that were stored
        ended = torch.as_tensor(seen.envs.terminated | seen.envs.truncated).double()
        ended = torch.cat((torch.zeros(1, 2).double(), ended))
        assert_close(dones, ended[8 * k : 8 * k + 8])
        assert_close(next_done, ended[8 * k + 8])
        before = rollout.minibatches[0].before
        seen.agent.load_state_dict({name: value.float() for name, value in before.items()})
        next_obs = torch.as_tensor(seen.envs.observations[8 * k + 8])
        assert_close(next_value, seen.agent.get_value(next_obs).detach())
        returns = call.answer[1].flatten()
        for minibatch in rollout.minibatches:  # in all epochs, targets are those of the first
            error = minibatch.value - returns[minibatch.rows]
            assert_close(minibatch.gradients["value"], error / len(error), atol=1e-5)


unit = st.floats(0, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), gamma=unit, gae_lambda=unit, bars=st.tuples(*[st.floats(1, 5)] * 2))
def test_vtrace_is_gae_on_policy(data, gamma, gae_lambda, bars):
    """Where all ratios are 1, to the advantages of ppo_atari.py."""
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    numbers, flags = st.floats(-10, 10), st.sampled_from([0.0, 1.0])
    shapes = [((rows, columns), numbers)] * 2 + [((rows, columns), flags)]
    shapes += [((columns,), numbers), ((columns,), flags)]
    rollout = [torch.tensor(data.draw(arrays(float, s, elements=e))) for s, e in shapes]
    ours = APPO.compute_vtrace(torch.ones_like(rollout[0]), *rollout, gamma, gae_lambda, *bars)
    theirs = ATARI.compute_gae(*rollout, gamma, gae_lambda)
    assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-9)
    assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-9)


bounds = st.sampled_from([0.0, 0.05, 0.5, 1.0, 3.0, 1e6])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), gamma=unit, gae_lambda=unit, rho_bar=bounds, c_bar=bounds)
def test_vtrace_equals_its_definition(seed, gamma, gae_lambda, rho_bar, c_bar):
    drawn = off_policy(seed, steps=1 + seed % 10)
    returns = APPO.compute_vtrace(*drawn, gamma, gae_lambda, rho_bar, c_bar)[1]
    expected = vtrace_oracle(*drawn, gamma, gae_lambda, rho_bar, c_bar)
    scale = np.abs(expected).max() + 1
    assert_close(returns / scale, expected / scale, rtol=0, atol=1e-9)


APPO, ATARI = load_script("appo_async"), load_script("ppo_atari")


@shown_by("appo 6")
def test_appo_06_back_pressure(script, tmp_path):
    for batch in (8, 24):  # one trajectory of each environment, and three
        with stage(script, minibatch_size=batch) as there:
            shared, args, bound = there.shared, there.args, there.args.slots_per_split
            assert bound == 1 + batch // 8, "a batch can be whole, and one more is being filled"
            worker = script.rollout_worker(args, shared, 0)
            policy = script.policy_worker(args, shared, 0)

            def drive(worker=worker, policy=policy):
                for _ in range(20):
                    next(worker), next(policy)

            drive()
            # every slot is full, and then no step is taken and no action asked for
            assert there.times() == [4 * bound] and shared.filled.tolist() == [bound]
            assert there.waiting() == [False]
            first = there.envs[0].observations
            for slot in range(bound):
                assert np.array_equal(shared.obs[slot], first[4 * slot : 4 * slot + 5])
            for more in (1, 2):  # for each that has been consumed, one more, in its place
                shared.consumed += 1
                drive()
                assert there.times() == [4 * (bound + more)]
                steps = slice(4 * (bound + more - 1), 4 * (bound + more) + 1)
                assert np.array_equal(shared.obs[more - 1], first[steps])

    # with several workers and splits, together they hold a batch beside what is being filled
    for workers, splits, envs in ((1, 1, 3), (2, 2, 4), (3, 1, 5), (1, 2, 2)):
        sizes = {"num_workers": workers, "num_splits": splits, "envs_per_worker": envs}
        args = script.Args(**sizes, num_steps=4, minibatch_size=96)
        held = (args.slots_per_split - 1) * args.total_splits * args.envs_per_split * 4
        assert 96 <= held < 96 + args.total_splits * args.envs_per_split * 4

    # the learner gives a slot back when all of its trajectories have been copied, not earlier:
    # here each is a batch of its own
    teams, consumed, plain = [], [], script.compute_vtrace

    class Team(script.Team):
        def __init__(self, args, shared):
            super().__init__(args, shared)
            teams.append(self)

    def compute_vtrace(*args):
        consumed.append(int(teams[-1].shared.consumed[0]))
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "Team", Team)
        patch.setattr(script, "compute_vtrace", compute_vtrace)
        args = {"env_id": "toy_envs:ToyAtari-v0", "eval_episodes": 0, "run_dir": str(tmp_path)}
        script.train(script.Args(**(TINY["appo_async"] | {"minibatch_size": 4} | args)))
    assert consumed == [0, 1, 1, 2]
