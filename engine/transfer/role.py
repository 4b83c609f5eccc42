"""What an engine needs so that prompts computed by one are answered by another."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import Role
from engine.kv.page_seed import VARIABLE as SEED_VARIABLE
from engine.kv.page_seed import page_seed
from engine.transfer.address import VARIABLE as REDIS_VARIABLE
from engine.transfer.address import redis_url
from engine.transfer.peer_address import PeerAddress


def check_role(role: Role, kv_listen: str | None, kv_address: str | None, kv_peers: Sequence[str]) -> None:
    """Raises ValueError for settings that do not fit together, with what is missing."""
    for address in (kv_address, *kv_peers):
        if address is not None and PeerAddress.parse(address).is_wildcard:
            raise ValueError(f"'{address}' is no address to go to")
    if kv_address is not None and kv_listen is None:
        raise ValueError("'--kv-address' says how others reach '--kv-listen', which is not given")
    if kv_listen is not None and PeerAddress.parse(kv_listen).is_wildcard and kv_address is None:
        raise ValueError(f"others cannot go to '{kv_listen}': say by '--kv-address' what they are to use")
    if (kv_listen is not None or kv_peers) and page_seed() is None:
        raise ValueError(
            f"pages that engines exchange are named and sealed by {SEED_VARIABLE}: set it to the same 64 hexadecimal "
            "digits for all of them (openssl rand -hex 32)"
        )
    if role == "prefill" and kv_listen is None and redis_url() is None:
        raise ValueError(f"'--role prefill': others must get its pages, by '--kv-listen' or by {REDIS_VARIABLE}")
    if role == "decode" and not kv_peers and redis_url() is None:
        raise ValueError(f"'--role decode': it must get pages of others, by '--kv-peer' or by {REDIS_VARIABLE}")
