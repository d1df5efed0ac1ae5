"""What each check is about, in plain words, and how to mend what it finds."""

from typing import NamedTuple


class About(NamedTuple):
    """What holds when the check does, and what to do when it does not."""

    title: str
    mend: str


_REPLAYED = "headrace.ReplayedEnvironment does it for you: write _reset and _step instead of reset and step."
_STATE = (
    "Keep all state on `self` and set it in reset: none on the class, in a module's variable or in a default argument."
)

ABOUT = {
    "it_loads": About("it loads", "The message names the file and line."),
    "splits_have_tasks": About(
        "train, dev and hidden have tasks",
        "Training plays `train` and is measured on `dev`: give more rows, or a source of tasks for each split.",
    ),
    "position_decides": About(
        "a position decides the task, however many are taken at once",
        "Draw each task from a random.Random of its own, seeded with the split, the seed and the position.",
    ),
    "state_is_a_position": About(
        "a source goes back to a position", "`state` counts the tasks given out; `restore` goes there and nowhere else."
    ),
    "splits_are_disjoint": About(
        "no task and no seed of training is evaluated on",
        "Divide the tasks by their content, and give each split seeds of its own.",
    ),
    "seeds_are_apart": About(
        "tasks have seeds, and no split has one of another",
        "Leave the seed out and headrace gives one, or draw it with the split's name in it.",
    ),
    "an_id_names_one_task": About(
        "an id names one task", "Make task_id from the task's content or from an `id` of its own, not from its place."
    ),
    "tasks_say_where_they_belong": About(
        "tasks name their split and environment", "Set task_id, environment and split of every Task."
    ),
    "tasks_survive_the_wire": About(
        "tasks are JSON", "Use text, numbers, booleans, None, lists, and dicts with text as keys, in a task's data."
    ),
    "it_plays": About(
        "an episode can be played",
        "Plain Python errors are faults of the environment; a mistake of the model is answered, with"
        " StepResult(messages=…, status=Status.MODEL_INVALID_ACTION).",
    ),
    "states_are_hashed": About(
        "states have hashes", "Return state_hash=headrace.hash_value(all that decides what comes next)."
    ),
    "same_seed_same_world": About(
        "the same task, seed and actions give the same episode",
        "Draw from random.Random(seed) made in reset; use no global random, no clock, no order of a set. " + _STATE,
    ),
    "the_script_ends_once": About(
        "an episode ends once, and a step after the end raises",
        "Remember the end and raise in step after it. " + _REPLAYED,
    ),
    "terminated_is_not_truncated": About(
        "the end of a task is told from a limit, and a fault is raised",
        "Set terminated where the task has ended and truncated where a limit ended it, never both; answer every other"
        " step with a message, and raise headrace.EnvironmentFault where the world fails.",
    ),
    "a_key_is_used_once": About(
        "a repeated key repeats the result and does nothing",
        "Keep the result of each key, and return it when the key comes again. " + _REPLAYED,
    ),
    "a_key_belongs_to_one_message": About(
        "a known key with another message raises", "Compare the message with the key's first one. " + _REPLAYED
    ),
    "a_new_key_is_a_new_effect": About(
        "an equal message under a new key acts again", "Tell calls apart by their key, not by what they say."
    ),
    "sessions_share_nothing": About("sessions do not see each other", _STATE),
    "a_replay_is_equal": About(
        "an episode that is played again from its record is the same",
        "Nothing but task, seed and messages may decide what is answered: no key, no clock, and nothing that an earlier"
        " session left behind when it was closed. " + _STATE,
    ),
    "snapshots_go_back": About(
        "a snapshot brings the state back, with no key known",
        "Copy the whole state in snapshot, and in restore empty the table of keys. " + _REPLAYED,
    ),
    "snapshots_keep_the_random_state": About(
        "what is drawn after a snapshot is drawn again after its restore",
        "Keep the state of every random.Random (getstate) in the snapshot and in the clone, and set it in restore. "
        + _REPLAYED,
    ),
    "clones_are_independent": About(
        "a clone goes on by itself", "Copy the state deeply, and give the clone an empty table of keys. " + _REPLAYED
    ),
    "mistakes_of_the_model_are_answered": About(
        "a call of an unknown tool is answered",
        "Return StepResult(messages=(Message(Role.TOOL, what is wrong),), status=Status.MODEL_INVALID_ACTION), without"
        " a reward.",
    ),
    "everything_survives_the_wire": About(
        "metadata is JSON", "Use text, finite numbers, booleans, None, lists, and dicts with text as keys, in metadata."
    ),
    "tools_are_stable": About(
        "the tools stay the same, with a name and a schema each",
        "Return the same ToolSpecs from tools() all session long; set `name` and `version` of the environment.",
    ),
    "calls_end_in_time": About(
        "every call ends in time, and one that is cancelled leaves a session that closes",
        "Give whatever is waited for a time-out shorter than the recipe's reset_deadline_s and step_deadline_s; release"
        " locks in `finally`, let asyncio.CancelledError through, and let close wait for nothing that step does.",
    ),
    "close_is_safe_twice": About(
        "close is safe at any time, and nothing happens after it",
        "Let close do nothing when there is nothing to release, and let step raise after it. " + _REPLAYED,
    ),
    "step_before_reset_raises": About(
        "a step before reset raises", "Raise in step until reset was called. " + _REPLAYED
    ),
    "it_is_scored": About(
        "an episode is scored",
        "Return a RewardComponent with the last step, or give the environment a scorer; its reward must be a finite"
        " number.",
    ),
}
