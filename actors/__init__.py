"""One episode and all that it touches: the loop, its context, rendering, environments, scoring, replay."""
