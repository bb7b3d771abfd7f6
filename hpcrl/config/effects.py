"""Effects of a changed setting on a run that continues from a checkpoint, shared by several settings."""

from __future__ import annotations

from hpcrl.config.setting import Effect

OTHER_MODEL = Effect("refused", "the checkpoints hold the state of the other model", "refused")
OTHER_MOMENTS = Effect("refused", "the checkpoints hold the moments of the other optimizer", "refused")
OTHER_FUNCTION = Effect("refused", "the model would compute something else", "warning")
OTHER_PROMPTS = Effect(
    "refused", "a checkpoint counts the prompts that are trained, and these would be others", "warning"
)
OTHER_TOKENS = Effect("refused", "prompts would become other tokens", "warning")
OTHER_GROUPS = Effect("refused", "groups that wait to be trained have the old number of samples")
OTHER_RUN = Effect("refused", "it decides what kind of run this is")
OTHER_DIRECTORY = Effect("refused", "a run stays in its directory")
OTHER_PLACE = Effect(
    "refused",
    "the folder stays in its place; to move it, copy it while the run is stopped, and put a link to the copy there",
)
NO_TOKENS = Effect("refused", "groups that wait to be trained have no such tokens")

OBJECTIVE = Effect("warning", "what is optimized changes from the next step on")
OTHER_REFERENCE = Effect(
    "warning", "another reference from the next step on, unless checkpoints have one that has followed the policy"
)
UPDATES = Effect("warning", "learning rates and updates change from the next step on; the count of updates goes on")
LAST_STEP = Effect("warning", "the end moves, and with it a learning rate that falls towards it")
SAMPLING = Effect("warning", "groups that wait to be trained were sampled as before")
SCORES = Effect("warning", "scores before and after cannot be compared")
SPREAD = Effect("warning", "the state is spread over other processes; random states of ranks are drawn again")
ROUNDING = Effect("warning", "numbers are rounded in another way")
SOFTWARE = Effect("warning", "the job may find other software")

SAME_NUMBERS = Effect("harmless", "it does not change what is computed")
READING_SPEED = Effect("harmless", "only how fast prompts are read")
WRITTEN = Effect("harmless", "it concerns what is written and when")
ENDS_A_RUN = Effect("harmless", "it decides only what ends a run")
CALLS = Effect("harmless", "it concerns how environments are called, not the rewards")
CLUSTER = Effect("harmless", "only what is asked of the cluster")
