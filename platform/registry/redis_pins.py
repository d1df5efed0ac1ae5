"""Pins that all processes of a run share, on the ledger's server and its time (P12)."""

from headrace.platform.ledger.redis_link import RedisLink


class RedisPins:
    """`PinTable` on a server. Make one with `connect`."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    @classmethod
    async def connect(cls, url: str, run: str, *, connect_deadline_s: float = 10.0) -> "RedisPins":
        """Connect to the server of the run's ledger. Raises what `RedisLink.connect` raises."""
        link = await RedisLink.connect(url, run, deadline_s=connect_deadline_s)
        try:
            await link.open()
        except BaseException:
            await link.close()
            raise
        return cls(link)

    async def pin(self, version: int, holder: str, ttl_s: float) -> bool:
        """See `PinTable.pin`."""
        return bool((await self._link.transition("pin", version, holder, ttl_s))[0])

    async def unpin(self, version: int, holder: str) -> None:
        """See `PinTable.unpin`."""
        await self._link.command("unpin", self._link.client.zrem(f"{self._link.prefix}pins:{version}", holder))

    async def retire(self, version: int) -> bool:
        """See `PinTable.retire`. False as well while the server may have lost pins (P8), and for a term after that."""
        return bool((await self._link.transition("retire", version))[0])

    async def close(self) -> None:
        """Release connections."""
        await self._link.close()
