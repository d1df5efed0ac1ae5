"""Which version of an environment a group is played in (P17)."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class GroupVersion:
    """None until the first session of the group is connected; what it writes here all others must meet.

    As long as no session of the group has begun to play, one that fails to begin takes its choice back: the group is
    not bound to a version that nobody plays any more.
    """

    version: str | None = None
    beginning: int = 0
    has_begun: bool = False

    def take(self, version: str) -> bool:
        """Whether a session may be played in `version`; then `begun` or `given_up` must follow."""
        if self.version not in (None, version):
            return False
        self.version = version
        self.beginning += 1
        return True

    def begun(self) -> None:
        """A session that took a version plays."""
        self.beginning -= 1
        self.has_begun = True

    def given_up(self) -> None:
        """A session that took a version does not play."""
        self.beginning -= 1
        if not self.beginning and not self.has_begun:
            self.version = None
