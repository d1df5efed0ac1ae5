"""The one table of metric names: file, terminal and Prometheus alike take them from here.

A name says what is measured and its unit; `unit`, `kind` and `help` say the rest. A histogram is a map from bucket to
count; a labelled metric is a map from label to value.
"""

from enum import StrEnum


class Kind(StrEnum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    LABELLED = "labelled"


class Metric(StrEnum):
    """One metric. Its value is its name; `unit`, `kind` and `help` describe it."""

    unit: str
    kind: Kind
    help: str

    def __new__(cls, name: str, unit: str, kind: Kind, help: str) -> "Metric":
        """Make the member `name` with its description."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit, member.kind, member.help = unit, kind, help
        return member

    TIME_S = ("time_s", "s", Kind.GAUGE, "When the record was written, seconds since the epoch")
    STAGE = ("stage", "", Kind.GAUGE, "The stage of the run: an SFT stage's name, rl or eval")

    SFT_STEP = ("sft_step", "steps", Kind.COUNTER, "Optimizer steps in the present SFT stage")
    SFT_LOSS = ("sft_loss", "nats", Kind.GAUGE, "Cross entropy over action tokens of SFT traces")
    SFT_SUCCESS = ("sft_success", "", Kind.GAUGE, "Sampled mean score of the policy at the end of SFT: the baseline")

    LEARNER_STEP = ("learner_step", "steps", Kind.COUNTER, "Optimizer steps of the learner")
    POLICY_VERSION = ("policy_version", "", Kind.GAUGE, "Number of the newest published version")
    LOSS = ("loss", "", Kind.GAUGE, "Policy loss, mean over the loss tokens of the step")
    KL = ("kl", "nats", Kind.GAUGE, "Approximate divergence of the learner from the behaviour policy (k3)")
    LOGPROB_GAP = ("logprob_gap", "nats", Kind.LABELLED, "Mean gap of logprobs, learner to engine, by replica@version")
    GAP_ALARMS = ("gap_alarms", "alarms", Kind.LABELLED, "Batches in which a replica had other weights than it said")
    CLIP_SHARE = ("clip_share", "share", Kind.GAUGE, "Share of loss tokens whose ratio was clipped")
    RATIO_BY = ("ratio_by", "", Kind.LABELLED, "Mean ratio of learner to behaviour, by lag and by length")
    KL_BY = ("kl_by", "nats", Kind.LABELLED, "Mean divergence of learner from behaviour (k3), by lag and length")
    CLIP_SHARE_BY = ("clip_share_by", "share", Kind.LABELLED, "Share of loss tokens clipped, by lag and by length")
    ESS_TOKENS = ("ess_tokens", "share", Kind.LABELLED, "Effective sample size of tokens, by lag and length")
    ESS_SEQUENCES = ("ess_sequences", "share", Kind.LABELLED, "That of sequences, by lag and length")
    ENTROPY = ("entropy", "nats", Kind.GAUGE, "Mean entropy of the policy at loss tokens, where the loss has a bonus")
    REFERENCE_KL = ("reference_kl", "nats", Kind.GAUGE, "Divergence from the reference (k3), where it is charged")
    VALUE_LOSS = ("value_loss", "", Kind.GAUGE, "Mean loss of the critic over loss tokens, where there is one")
    ENVIRONMENT_LOSS = ("environment_loss", "nats", Kind.GAUGE, "Cross entropy on what tools sent, where it is learned")
    LEARNING_RATE = ("learning_rate", "", Kind.GAUGE, "Of the policy, in the step")
    GRAD_NORM = ("grad_norm", "", Kind.GAUGE, "Gradient norm before clipping")
    LOSS_TOKENS = ("loss_tokens", "tokens", Kind.GAUGE, "Tokens that entered the loss of the step")
    GROUPS_TRAINED = ("groups_trained", "groups", Kind.GAUGE, "Groups in the learner's batch")
    EPISODES_TRAINED = ("episodes_trained", "episodes", Kind.GAUGE, "Episodes in the learner's batch")
    LEARNER_BUSY_S = ("learner_busy_s", "s", Kind.GAUGE, "Time that the step spent computing")
    LEARNER_WAIT_S = ("learner_wait_s", "s", Kind.GAUGE, "Time that the step waited for its batch")
    SCORE_MEAN = ("score_mean", "", Kind.GAUGE, "Mean score of the trained episodes; biased by what is dropped")
    HELD_S = ("held_s", "s", Kind.GAUGE, "Time that a step was held for groups that it would push over the limit")
    BUBBLE_S = ("bubble_s", "s", Kind.COUNTER, "Time that the learner has waited instead of working")
    LAG = ("lag", "episodes", Kind.HISTOGRAM, "Trained episodes of the step by lag in learner batches (P14)")
    LAG_MAX_TRAINED = ("lag_max_trained", "batches", Kind.GAUGE, "Largest lag trained on so far")
    LAG_SHARE_GE1 = ("lag_share_ge1", "share", Kind.GAUGE, "Share of trained episodes with a lag of one or more")

    SUCCESS = ("success", "", Kind.GAUGE, "Mean score of all training episodes put lately, dropped ones included")
    SUCCESS_BY_ENVIRONMENT = ("success_by_environment", "", Kind.LABELLED, "The same, by environment")
    EPISODES_BY_ENVIRONMENT = ("episodes_by_environment", "episodes", Kind.LABELLED, "Training episodes so far")
    FAULTS_BY_ENVIRONMENT = ("faults_by_environment", "episodes", Kind.LABELLED, "Training episodes that broke, so far")
    SANDBOX_DIED = ("sandbox_died", "episodes", Kind.LABELLED, "Those whose sandbox was gone, so far, by environment")
    CALLS = ("calls", "calls", Kind.COUNTER, "Tool calls that the gateway decided on, in training episodes")
    VIOLATIONS = ("violations", "calls", Kind.COUNTER, "Calls that the gateway denied for safety; none had an effect")
    BLOCKED = ("blocked", "calls", Kind.LABELLED, "All denied calls by rule, mistakes of the model included")
    EXFILTRATION = ("exfiltration", "calls", Kind.COUNTER, "Denied calls that would have carried untrusted text out")
    DUPLICATES = ("duplicates", "calls", Kind.COUNTER, "Calls that came again under their key; none acted twice (P25)")
    PLANTED = ("planted", "instructions", Kind.COUNTER, "Instructions that environments planted in tool output")
    OBEDIENCE = ("obedience", "share", Kind.GAUGE, "Share of the planted instructions that the model followed")
    PLANTED_EFFECTS = ("planted_effects", "calls", Kind.COUNTER, "Calls that followed one and were allowed")
    SEGMENTS_OPENED = ("segments_opened", "segments", Kind.COUNTER, "Contexts that could not be extended exactly (T3)")

    EVAL_VERSION = ("eval_version", "", Kind.GAUGE, "The version that was evaluated")
    EVAL_SUCCESS = ("eval_success", "share", Kind.GAUGE, "Share of evaluation episodes with a score of at least 1")
    EVAL_SCORE = ("eval_score", "", Kind.GAUGE, "Mean score on evaluation tasks")
    EVAL_LOW = ("eval_low", "", Kind.GAUGE, "Lower end of the mean score's 95 % bootstrap interval")
    EVAL_HIGH = ("eval_high", "", Kind.GAUGE, "Upper end of the mean score's 95 % bootstrap interval")
    EVAL_PASS_HAT = ("eval_pass_hat", "share", Kind.LABELLED, "pass^k by k: all of k episodes of a task succeed")
    EVAL_BY_ENVIRONMENT = ("eval_by_environment", "", Kind.LABELLED, "Mean score by environment")
    EVAL_UNSCORED = ("eval_unscored", "episodes", Kind.GAUGE, "Evaluation episodes without a valid reward")
    EPISODES_PER_S = ("episodes_per_s", "episodes/s", Kind.GAUGE, "Episodes put a second")
    TOKENS_PER_S = ("tokens_per_s", "tokens/s", Kind.GAUGE, "Tokens that the policy sampled a second")
    EPISODES_RUNNING = ("episodes_running", "episodes", Kind.GAUGE, "Episodes in play")

    DISPATCHED = ("dispatched", "attempts", Kind.COUNTER, "Attempts dispatched (P3)")
    FATES = ("fates", "attempts", Kind.LABELLED, "Attempts by fate and reason (P3)")
    DISCARDED = ("discarded", "share", Kind.LABELLED, "Share of ended attempts not trained, by fate and reason")
    DISCARDED_TIME = ("discarded_time", "share", Kind.LABELLED, "The same in slot-seconds")
    TRAINED_BY_LENGTH = ("trained_by_length", "share", Kind.LABELLED, "Share trained, by decile of time in play (P16)")
    LENGTH_BIAS = ("length_bias", "", Kind.GAUGE, "1 once protected tasks were lost to lag after all (P16)")
    PUTS_REFUSED = ("puts_refused", "attempts", Kind.LABELLED, "Refused puts by verdict (P2)")
    GROUPS_OPEN = ("groups_open", "groups", Kind.GAUGE, "Groups whose members are still played")
    GROUPS_READY = ("groups_ready", "groups", Kind.GAUGE, "Groups that wait for the learner: the queue's depth")
    GROUPS_LEASED = ("groups_leased", "groups", Kind.GAUGE, "Groups that the learner holds")
    QUEUE_BYTES = ("queue_bytes", "bytes", Kind.GAUGE, "Payload bytes in the queue's memory")

    RESTARTS = ("restarts", "restarts", Kind.LABELLED, "Parts started again after they died, by part")
    LEDGER_EPOCH = ("ledger_epoch", "", Kind.GAUGE, "How often the ledger was rebuilt from the manifest chain (P8)")
    REPLICAS = ("replicas", "replicas", Kind.GAUGE, "Inference replicas in the pool")
    REQUESTS_RUNNING = ("requests_running", "requests", Kind.GAUGE, "Generation requests in flight")
    LOADED_VERSION = ("loaded_version", "", Kind.GAUGE, "Newest version that a replica holds")
    LOAD_FAILURES = ("load_failures", "loads", Kind.COUNTER, "Versions that a replica failed to load")
    ROLLED_S = ("rolled_s", "s", Kind.COUNTER, "Time that replicas were between two versions and sampled nothing (P22)")
    RETRIED = ("retried", "requests", Kind.COUNTER, "Generations asked for again under their key (P24)")
    RESAMPLED = ("resampled", "requests", Kind.COUNTER, "Generations sampled again as their replica was gone (P24)")
    OVERLAP = ("overlap", "share", Kind.GAUGE, "Share of the learner's busy time in which a generation or tool ran")
