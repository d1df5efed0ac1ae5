"""What one command prints: bounded, found to its end, and decoded once, so that no character is split (case X10)."""

from collections import deque

_LONGEST_NAME = 64
_MOST_MARKS = 8


class Output:
    """Bytes until a mark, of which the first and the last half of `limit` bytes are kept.

    A mark is `begins`, a name and NUL. One of `names` ends the output; any other belonged to a command that nobody
    waits for, and so did all that was printed before it. `left_out` counts bytes that are not kept, `taken` all;
    `ended` is true once the mark was seen. Of what comes after it only the last few marks are kept, as `rest`, for the
    next output.
    """

    def __init__(self, begins: bytes, names: tuple[str, ...], limit: int) -> None:
        self._begins = begins
        self._names = {name.encode() for name in names}
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self._held = b""
        self._later: deque[bytes] = deque(maxlen=_MOST_MARKS)
        self.left_out = self.taken = 0
        self.ended = False

    @property
    def rest(self) -> bytes:
        """The marks that came after the end, and what may become one."""
        return b"".join(self._later) + self._held

    def feed(self, data: bytes) -> None:
        """Take what was read next."""
        self.taken += len(data)
        data, self._held = self._held + data, b""
        start = 0
        while (where := data.find(self._begins, start)) >= 0:
            self._keep(data[start:where])
            name = where + len(self._begins)
            end = data.find(b"\0", name, name + _LONGEST_NAME)
            if end < 0 and len(data) < name + _LONGEST_NAME:
                self._held = data[where:]
                return
            start = end + 1 if end >= 0 else name
            if end >= 0:
                self._mark(data[where:start], data[name:end])
        # A mark may be cut in two by the read; only from a NUL on can it begin.
        cut = data.rfind(b"\0", max(start, len(data) - len(self._begins) + 1))
        self._held = data[cut:] if cut >= 0 else b""
        self._keep(data[start:cut] if cut >= 0 else data[start:])

    def text(self) -> str:
        """All that is kept, as text; a note stands for what was left out."""
        if not self.left_out:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        head, tail = (part.decode("utf-8", errors="replace") for part in (self._head, self._tail))
        return f"{head}\n[... {self.left_out} bytes left out ...]\n{tail}"

    def _mark(self, mark: bytes, name: bytes) -> None:
        if self.ended:
            self._later.append(mark)
        elif name in self._names:
            self.ended = True
        else:
            self._head.clear()
            self._tail.clear()
            self.left_out = 0

    def _keep(self, data: bytes) -> None:
        if self.ended:
            return
        room = max(self._half - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        over = len(self._tail) - self._half
        if over > 0:
            self.left_out += over
            del self._tail[:over]
