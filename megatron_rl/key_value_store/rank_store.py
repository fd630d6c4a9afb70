"""A torch.distributed store backed by the key-value store. gloo and NCCL process groups use it for rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from megatron_rl.key_value_store.store_client import KeyValueClient


class RankStore(dist.Store):
    """A torch.distributed store that keeps its keys in a key-value store of this package. torch's C++ code calls the
    methods by name.

    The creator of a process group on this store, or on a PrefixStore over it, must keep a reference to this object for
    the lifetime of the group, because torch keeps only the C++ half of the object alive.
    """

    def __init__(self, client: KeyValueClient, timeout: timedelta) -> None:
        """Creates the store. `timeout`: default timeout of waits for a key."""
        super().__init__()
        self._client = client
        self.set_timeout(timeout)

    def clone(self) -> RankStore:
        """Returns this same store instead of a copy, because the store is thread-safe."""
        return self

    def set(self, key: str, value: Any) -> None:
        self._client.set({key: _bytes(value)})

    def get(self, key: str) -> bytes:
        return self._client.get([key], self._patience())[0]

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._client.compare_set(key, _bytes(expected_value), _bytes(desired_value))

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._client.wait(keys, self._patience() if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._client.remove(key)

    def num_keys(self) -> int:
        return self._client.num_keys()

    def append(self, key: str, value: Any) -> None:
        self._client.append(key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._client.get(keys, self._patience())

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._client.set({key: _bytes(value) for key, value in zip(keys, values, strict=True)})

    def has_extended_api(self) -> bool:
        """Returns True, which tells torch that `append`, `multi_get` and `multi_set` are implemented."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ code calls

    def _patience(self) -> float:
        return cast(Any, self).timeout.total_seconds()  # cast, because torch's type stubs lack `timeout`


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
