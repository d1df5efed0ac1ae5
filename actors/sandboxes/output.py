"""What one command prints: bounded, found to its end, and decoded once, so that no character is split (case X10)."""

_LONGEST_NAME = 64


class Output:
    """Bytes until a mark, of which the first and the last half of `limit` bytes are kept.

    A mark is `begins`, a name and NUL. One of `names` ends the output; any other is left out, and belonged to a command
    that nobody waits for. `left_out` counts bytes that are not kept; `ended` is true once the mark was seen, and what
    comes after it is `rest`, for the next output.
    """

    def __init__(self, begins: bytes, names: tuple[str, ...], limit: int) -> None:
        self._begins = begins
        self._names = {name.encode() for name in names}
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._held = b""
        self.left_out = 0
        self.ended = False
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """Take what was read next."""
        if self.ended:
            self.rest += data
            return
        data, self._held = self._held + data, b""
        while not self.ended and (where := data.find(self._begins)) >= 0:
            self._keep(data[:where])
            data = data[where:]
            end = data.find(b"\0", len(self._begins))
            if end < 0 and len(data) < len(self._begins) + _LONGEST_NAME:
                self._held = data
                return
            self.ended = data[len(self._begins) : end] in self._names
            data = data[end + 1 :] if end >= 0 else data[len(self._begins) :]
        if self.ended:
            self.rest = data
            return
        # A mark may be cut in two by the read; only from a NUL on can it begin.
        cut = data.rfind(b"\0", max(0, len(data) - len(self._begins) + 1))
        self._held = data[cut:] if cut >= 0 else b""
        self._keep(data[:cut] if cut >= 0 else data)

    def text(self) -> str:
        """All that is kept, as text; a note stands for what was left out."""
        if not self.left_out:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        head, tail = (part.decode("utf-8", errors="replace") for part in (self._head, self._tail))
        return f"{head}\n[... {self.left_out} bytes left out ...]\n{tail}"

    def _keep(self, data: bytes) -> None:
        room = max(self._half - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        over = len(self._tail) - self._half
        if over > 0:
            self.left_out += over
            del self._tail[:over]
