"""What passes between the ranks of one model, seen from one of them: sums, logits, states, and rank 0's calls.

Tensors go by torch.distributed, NCCL between GPUs and gloo on a CPU, on this machine only; the ranks find each other by
a file that only this user can read. Calls go by a socket from rank 0 to each of the others, which never wait in a
collective operation while there is nothing to do. A rank that is lost shows as an error here, or as the end of a
process there (`crew.py`), whichever comes first: either way the engine's core ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine.messages import FrameReader, encode_frame
from engine.parallel.calls import Call
from engine.parallel.errors import LayoutError, PeersLost
from engine.parallel.layout import Place, vocabulary_of

# Until all ranks have met; and for an operation of several ranks, the first of which waits for the slowest to load.
JOIN_SECONDS = 180
_OPERATION_SECONDS = 1800
_RECEIVE_BYTES = 1 << 18


class Peers:
    """The ranks of one model. Every method that takes several ranks is to be called by all of them in one order."""

    def __init__(self, place: Place, device: torch.device, followers: Sequence[socket.socket]) -> None:
        """`followers`: on rank 0, a socket to each of the others. Use `join`."""
        self.place = place
        self.device = device
        self._followers = followers
        self._world: dist.ProcessGroup | None = None
        self._stage: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, place: Place, device: torch.device, meeting: Path, followers: Sequence[socket.socket] = ()) -> Peers:
        """Meet the other ranks by the file `meeting`, which none of them has written to before.

        Raises RuntimeError where they do not come within `JOIN_SECONDS`.
        """
        # Ranks are on one machine: nothing of theirs is to be had from outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        peers = cls(place, device, followers)
        layout = place.layout
        store = FileStore(str(meeting), layout.num_ranks)
        store.set_timeout(timedelta(seconds=JOIN_SECONDS))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=layout.num_ranks,
            timeout=timedelta(seconds=_OPERATION_SECONDS),
        )
        peers._world = dist.group.WORLD
        for first in range(0, layout.num_ranks, layout.tensor):  # every rank takes part in making every group
            ranks = range(first, first + layout.tensor)
            group = dist.new_group(list(ranks))
            if place.rank in ranks:
                peers._stage = group
        return peers

    def leave(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()

    # --- calls ---------------------------------------------------------------------------------------------------

    def announce(self, call: Call) -> None:
        """On rank 0: tell the others what all do next. Raises PeersLost."""
        frame = encode_frame(call)
        try:
            for follower in self._followers:
                follower.sendall(frame)
        except OSError as error:
            raise PeersLost(f"a rank cannot be reached: {error}") from error

    # --- tensors -------------------------------------------------------------------------------------------------

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks of this stage have, on each of them.

        On a CPU terms are added in the order of the ranks, so that a token's bits do not depend on its neighbours.
        """
        ranks = self.place.layout.tensor
        if ranks == 1:
            return x
        x = x.contiguous()
        try:
            if x.device.type != "cpu":
                dist.all_reduce(x, group=self._stage)
                return x
            terms = torch.empty((ranks, *x.shape), dtype=x.dtype)
            dist.all_gather(list(terms.unbind()), x, group=self._stage)
        except RuntimeError as error:
            raise PeersLost(f"a sum over the ranks failed: {error}") from error
        out = terms[0]
        for term in terms[1:]:
            out += term
        return out

    def handed_out(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has, on each rank of its stage."""
        x = x.contiguous()
        try:
            dist.broadcast(x, 0, group=self._stage)
        except RuntimeError as error:
            raise PeersLost(f"handing out states failed: {error}") from error
        return x

    def joined(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """On rank 0 `[rows, size]` of the parts `[rows, part]` that its stage has, see `vocabulary_of`; elsewhere x."""
        ranks = self.place.layout.tensor
        width = len(vocabulary_of(size, ranks, 0))
        padded = torch.nn.functional.pad(x, (0, width - x.shape[1])).contiguous()
        parts = torch.empty((ranks, *padded.shape), dtype=x.dtype, device=x.device) if self.place.leads else None
        try:
            dist.gather(padded, None if parts is None else list(parts.unbind()), 0, group=self._stage)
        except RuntimeError as error:
            raise PeersLost(f"collecting logits failed: {error}") from error
        return x if parts is None else parts.transpose(0, 1).flatten(1)[:, :size]

    def pass_on(self, state: torch.Tensor) -> None:
        """Give the next stage what it goes on with."""
        try:
            dist.send(state.contiguous(), self.place.next_rank)
        except RuntimeError as error:
            raise PeersLost(f"the next stage did not take its states: {error}") from error

    def passed(self, *shape: int) -> torch.Tensor:
        """What the previous stage passed on: float32 of `shape`."""
        state = torch.empty(shape, dtype=torch.float32, device=self.device)
        try:
            dist.recv(state, self.place.previous_rank)
        except RuntimeError as error:
            raise PeersLost(f"the stage before sent no states: {error}") from error
        return state

    def least(self, number: int) -> int:
        """The smallest of the numbers that all ranks have."""
        value = torch.tensor([number], dtype=torch.int64, device=self.device)
        try:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=self._world)
        except RuntimeError as error:
            raise PeersLost(f"the ranks did not agree on a size: {error}") from error
        return int(value.item())


def choose_device(asked: str | None, place: Place) -> torch.device:
    """Where the rank at `place` computes: on a GPU of its own, or on the CPU. Raises LayoutError for too few GPUs."""
    kind = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if count < place.layout.num_ranks:
        raise LayoutError(
            f"{place.layout.num_ranks} ranks need a GPU each, and there are {count}: "
            "lower tensor_parallel or pipeline_parallel"
        )
    torch.cuda.set_device(place.rank)
    return torch.device("cuda", place.rank)


def calls(connection: socket.socket) -> Iterator[Call]:
    """What rank 0 announces, until it closes the connection."""
    decoder = msgspec.msgpack.Decoder(Call)
    frames = FrameReader()
    while True:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except ConnectionResetError:  # closed before it has read what this rank said last
            return
        if not data:
            return
        for payload in frames.feed(data):
            yield decoder.decode(payload)
