"""What unequal tensor parallelism costs a push: one rank to two, against one to one, the same bytes over shared memory.

A 70B-class layout (80 layers, 8 KV heads of 128, bfloat16, 16 tokens: 5 MiB a block). One to one, a block is one copy;
one to two, each receiver is sent four heads of every layer, 80 copies of 32 KiB. A round is a whole push of scattered
blocks: from the moment when all are ready, through planning, copies and the receivers' words, until the leader of the
receiving gang has committed and the source is released. Rounds alternate between the two.
"""

from __future__ import annotations

import multiprocessing
import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.report import Report, Result, arguments, at_least, finish
from kv_transfer.checksum import as_memory
from kv_transfer.checksum import checksums as sums_of
from kv_transfer.native_library import load
from kv_transfer.protocol.codec import decode, encode
from kv_transfer.protocol.gang import GangReceiver
from kv_transfer.protocol.gang_leader import CommitAtRank, HandOutGrant, LeaderEffect, OpenAtRank, TargetLeader
from kv_transfer.protocol.gang_sender import GangSender
from kv_transfer.protocol.layout import KVLayout, LayerGroup
from kv_transfer.protocol.limits import PushLimits
from kv_transfer.protocol.messages import (
    BlockGrant,
    ConnectPeer,
    FirstToken,
    Grant,
    PeerId,
    PushArrived,
    PushEffect,
    PushKey,
    SendMessage,
    SourceReleased,
    VerifyBlocks,
    WriteBlocks,
)
from kv_transfer.protocol.plan import summed_first
from kv_transfer.protocol.ranks import GangLayout, bad_blocks, pair_gangs, rank_of, rank_peer
from kv_transfer.protocol.sampling import Checksums
from kv_transfer.transport.base import Connected, Notified, TransportEvent, WriteCompleted
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_pool import create_pool

LAYOUT = KVLayout(groups=(LayerGroup(num_layers=80, num_kv_heads=8, head_dim=128),), block_size=16, dtype="bfloat16")
NUM_BLOCKS = 52
"""260 MiB."""
MAX_BLOCKS_PER_WRITE = 8
"""A write is planned while the one before it is being copied."""
NUM_ROUNDS = 40
NUM_QUICK_ROUNDS = 8
MIN_SHARE = 0.6
TIMEOUT_S = 60.0
LIMITS = PushLimits(max_blocks_per_write=MAX_BLOCKS_PER_WRITE)
SENDER, RECEIVER = PeerId("prefill-0", 1), PeerId("decode-0", 1)
SPAWN = multiprocessing.get_context("spawn")


class ReceivingRank:
    """One rank of the receiving gang, in a process of its own; its leader is at the other end of the pipe."""

    def __init__(self, me: PeerId, num_ranks: int, checksums: Checksums, pipe: Connection) -> None:
        gang = GangLayout(model="m", layout=LAYOUT, num_ranks=num_ranks)
        self.pair = pair_gangs(GangLayout(model="m", layout=LAYOUT), gang).pair(0, rank_of(me))
        self.pipe = pipe
        pool = create_pool(gang.rank_layout().pool_size_bytes(NUM_BLOCKS))
        self.memory = as_memory(pool.mapping)
        self.transport = ShmTransport(me, pool)
        self.machine = GangReceiver(LIMITS, checksums, num_layers=LAYOUT.num_layers)

    def run(self) -> None:
        self.pipe.send(self.transport.endpoint())
        poller = select.poll()
        poller.register(self.transport.fileno(), select.POLLIN)
        poller.register(self.pipe.fileno(), select.POLLIN)
        while True:
            poller.poll()
            for event in self.transport.poll():
                now_ns = time.monotonic_ns()
                if isinstance(event, Connected):
                    self.perform(self.machine.on_connected(now_ns, event.peer))
                elif isinstance(event, Notified):
                    self.perform(self.machine.on_message(now_ns, event.peer, decode(event.payload)))
            while self.pipe.poll():
                order = self.pipe.recv()
                if order is None:
                    return
                if isinstance(order, OpenAtRank):
                    self.perform(self.machine.open(time.monotonic_ns(), order.grant, [0]))
                    self.pipe.send(order)
                else:
                    self.perform(self.machine.committed(time.monotonic_ns(), order.key))

    def perform(self, effects: Sequence[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                self.transport.write(effect.peer, [], encode(effect.message))
            elif isinstance(effect, VerifyBlocks):
                sums = sums_of(self.memory, self.pair.target_ranges(effect.block_ids))
                bad = bad_blocks(effect.block_ids, sums, effect.checksums)
                self.perform(self.machine.on_verified(time.monotonic_ns(), effect.key, effect.chunk, bad, effect.rank))
            else:
                self.pipe.send(effect)


def receive(me: PeerId, num_ranks: int, checksums: Checksums, pipe: Connection) -> None:
    ReceivingRank(me, num_ranks, checksums, pipe).run()


class Case:
    """One sending rank, here, and the receiving gang's processes with their leader, here too."""

    def __init__(self, num_receivers: int, checksums: Checksums) -> None:
        gangs = [GangLayout(model="m", layout=LAYOUT, num_ranks=degree) for degree in (1, num_receivers)]
        self.pairs = pair_gangs(*gangs)
        self.peers = [rank_peer(RECEIVER, rank) for rank in range(num_receivers)]
        self.pipes: list[Connection] = []
        self.processes = []
        for peer in self.peers:
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=receive, args=(peer, num_receivers, checksums, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.pool = create_pool(LAYOUT.pool_size_bytes(NUM_BLOCKS))
        self.transport = ShmTransport(SENDER, self.pool)
        self.machine = GangSender(LIMITS, checksums, 0, num_layers=LAYOUT.num_layers)
        self.leader = TargetLeader(LIMITS)
        self.writes: dict[int, int] = {}
        self.endpoints = {peer: pipe.recv() for peer, pipe in zip(self.peers, self.pipes, strict=True)}
        self.poller = select.poll()
        for fd in (self.transport.fileno(), *(pipe.fileno() for pipe in self.pipes)):
            self.poller.register(fd, select.POLLIN)
        self.num_rounds = 0
        self.is_granted = False
        self.is_released = False

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(TIMEOUT_S)
        self.transport.close()
        self.pool.close()

    def push_s(self, rng: random.Random) -> float:
        """How long one push takes."""
        self.num_rounds += 1
        key = PushKey(f"r{self.num_rounds}", 1)
        sources, targets = (rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2))
        grant = Grant(
            key=key,
            lease_id=self.num_rounds,
            receiver=RECEIVER,
            sender=SENDER,
            blocks=tuple(BlockGrant(index, target, self.num_rounds) for index, target in enumerate(targets)),
            ttl_ns=LIMITS.lease_ttl_ns,
        )
        self.is_granted = self.is_released = False
        self.lead(self.leader.open(grant, range(len(self.peers))))
        self.wait_for(lambda: self.is_granted)
        self.perform(self.machine.open(time.monotonic_ns(), grant, NUM_BLOCKS, self.pairs.receiver_ranks(0)))
        start_s = time.perf_counter()
        self.perform(self.machine.blocks_ready(time.monotonic_ns(), key, list(enumerate(sources))))
        first = FirstToken(choice=0, position=0, token_id=1)
        self.perform(self.machine.finish(time.monotonic_ns(), key, 16 * NUM_BLOCKS, [first]))
        self.wait_for(lambda: self.is_released)
        return time.perf_counter() - start_s

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if not self.poller.poll(TIMEOUT_S * 1e3):
                raise TimeoutError("the push does not go on")
            for event in self.transport.poll():
                self.on_event(event)
            for rank, pipe in enumerate(self.pipes):
                while pipe.poll():
                    word = pipe.recv()
                    if isinstance(word, OpenAtRank):
                        self.lead(self.leader.on_opened(rank, word.grant.key))
                    else:
                        self.lead(self.leader.on_rank(rank, word))

    def on_event(self, event: TransportEvent) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(event, Connected):
            self.perform(self.machine.on_connected(now_ns, event.peer))
        elif isinstance(event, Notified):
            self.perform(self.machine.on_message(now_ns, event.peer, decode(event.payload)))
        elif isinstance(event, WriteCompleted):
            write_id = self.writes.pop(event.handle, None)
            if write_id is not None:
                self.perform(self.machine.on_write_completed(now_ns, write_id))
        else:
            raise RuntimeError(f"the push failed: {event}")

    def perform(self, effects: Sequence[PushEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ConnectPeer):
                self.transport.connect(effect.peer, self.endpoints[effect.peer])
            elif isinstance(effect, SendMessage):
                self.transport.write(effect.peer, [], encode(effect.message))
            elif isinstance(effect, WriteBlocks):
                pair = self.pairs.pair(0, rank_of(effect.peer))
                message = replace(effect.message, num_pieces=pair.num_pieces())
                pairs = list(zip(effect.source_blocks, (block.block_id for block in message.blocks), strict=True))
                copies, num_sums = pair.copies(summed_first(pairs, message.summed)), message.num_checksums
                handle = self.transport.write(effect.peer, copies, encode(message), num_sums=num_sums)
                self.writes[handle] = effect.write_id
            elif isinstance(effect, SourceReleased) and effect.committed:
                self.is_released = True
            else:
                raise RuntimeError(f"the push failed: {effect}")

    def lead(self, effects: Sequence[LeaderEffect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenAtRank | CommitAtRank):
                self.pipes[effect.rank].send(effect)
            elif isinstance(effect, HandOutGrant):
                self.is_granted = True
            elif isinstance(effect, PushArrived):
                self.lead(self.leader.committed(effect.key))
            else:
                raise RuntimeError(f"the push failed: {effect}")


def measure(num_rounds: int, checksums: Checksums) -> dict[int, list[float]]:
    """Seconds a push by number of receiving ranks; the first round of each connects and warms up."""
    rng = random.Random(1)
    cases = {num_receivers: Case(num_receivers, checksums) for num_receivers in (1, 2)}
    try:
        times: dict[int, list[float]] = {num_receivers: [] for num_receivers in cases}
        for number in range(num_rounds + 1):
            for num_receivers, case in cases.items():
                duration_s = case.push_s(rng)
                if number > 0:
                    times[num_receivers].append(duration_s)
        return times
    finally:
        for case in cases.values():
            case.close()


def evaluate(report: Report, times: dict[int, list[float]], checksums_are: str) -> None:
    """The target is for checksums off; with them on, the figure is only reported."""
    size_bytes = NUM_BLOCKS * LAYOUT.block_size_bytes
    rates = {number: [size_bytes / each / 1e9 for each in durations] for number, durations in times.items()}
    share = median(rates[2]) / median(rates[1])
    what = f"push 1 to 2 ranks / 1 to 1, checksums {checksums_are}"
    report.results.append(
        at_least(what, share, MIN_SHARE, "1") if checksums_are == "off" else Result(measure=what, value=share, unit="1")
    )
    report.details[f"checksums_{checksums_are}"] = {
        f"1_to_{number}": {
            "gigabytes_per_s_median": round(median(each), 3),
            "gigabytes_per_s": [round(rate, 2) for rate in each],
        }
        for number, each in rates.items()
    }


def plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    samples = {
        f"{case.replace('_', ' ')}\n{checksums_are.replace('_', ' ')}": found["gigabytes_per_s"]
        for checksums_are, cases in report.details.items()
        if checksums_are.startswith("checksums")
        for case, found in cases.items()
    }
    axes.boxplot(list(samples.values()), tick_labels=list(samples))
    axes.set(ylabel="GB/s", ylim=(0, None), title="A push of 260 MiB between ranks, 70B-class layout, shared memory")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    num_rounds = NUM_QUICK_ROUNDS if args.quick else NUM_ROUNDS
    report = Report("unequal_ranks")
    report.details |= {
        "block_bytes": LAYOUT.block_size_bytes,
        "num_blocks": NUM_BLOCKS,
        "max_blocks_per_write": MAX_BLOCKS_PER_WRITE,
        "native_copy": load() is not None,
    }
    for checksums in (Checksums.OFF, Checksums.FULL):
        evaluate(report, measure(num_rounds, checksums), checksums.value)
    finish(report, args, lambda path: plot(report, path))


if __name__ == "__main__":
    main()
