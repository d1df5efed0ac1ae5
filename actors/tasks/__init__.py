"""Tasks: where they come from, which split they belong to, and which one comes next.

    file, folder, data set ─► reading ─► Rows ─► splits ─► FiniteTasks ─┐
    function of a seed ──────────────────────► GeneratedTasks ──────────┴─► Worlds (mixture, curriculum) ─► a group

`open_tasks` is for recipes, `rows_tasks` for environments that bring their own rows.
"""

from headrace.actors.tasks.opening import open_tasks, rows_tasks

__all__ = ["open_tasks", "rows_tasks"]
