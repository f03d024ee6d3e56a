"""Named limits of the coordinator that no operator needs to set. Names say the unit."""

from __future__ import annotations

from typing import Final

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
MS_PER_S: Final = 1_000

HEARTBEATS_PER_TIMEOUT: Final = 5
"""A worker is given up after missing about so many heartbeats."""
MAX_LATE_TICK_NS: Final = NS_PER_S // 2
"""A tick that comes later than this says that the coordinator was away, not that its workers are silent."""
MAX_HEARTBEAT_MS: Final = 1000
"""Longest interval between heartbeats: placement and `baton status` want fresh numbers."""
EXCLUDE_AFTER_REFUSAL_NS: Final = 50 * NS_PER_MS
"""A decode worker that refused a reservation is not asked again by that request for so long."""
RESUBMIT_TIMEOUT_NS: Final = 10 * NS_PER_S
"""A front that was told of a failed attempt must answer within this, or the request ends."""
FINISHED_TIMEOUT_NS: Final = 60 * NS_PER_S
"""A finished request waits so long for the front's RequestDone, about as long as its worker keeps the last tokens.
After that they may be out of the front's reach for good, and the attempt has failed."""
RELEASE_TIMEOUT_NS: Final = 30 * NS_PER_S
"""A worker that has not released a cancelled leg by then is given up: nothing may stay held for ever."""
MAX_STEP_NS: Final = 30 * NS_PER_S
"""A worker whose step has been running for longer is given up: its heartbeats go on, its engine does not ..."""
MAX_STEP_FACTOR: Final = 8
"""... unless the longest step that it may plan would take more than that even at a fraction of its usual pace."""
MAX_TRIAL_NS: Final = 10 * NS_PER_S
"""A worker is kept to a request on trial for so long at most; then others are placed beside it."""
MAX_APART_NS: Final = 10 * NS_PER_S
"""A suspected request at the head of the queue waits for workers of its own for so long at most."""
MAX_UNCLEAR_NS: Final = NS_PER_S
"""A request whose last attempt failed waits for so long at most for what has become of the worker that computed it."""
MAX_SUSPICIONS: Final = 8
"""Lost workers that a suspected request is remembered with: the latest."""
MAX_OWN_FAILURES: Final = 2
"""Attempts at a request for which an engine computed nothing usable, before the request is ended for it."""
MAX_HAND_OVERS: Final = 4
"""So many answers at once are on their way from a worker that is being drained: the others go on there meanwhile."""
HAND_OVER_NS: Final = 5 * NS_PER_S
"""So long before the deadline of a drain, at most, running answers begin to go on elsewhere."""
LEAVE_TIMEOUT_NS: Final = 10 * NS_PER_S
"""A drained worker that was told to leave and is still there after so long is ended."""
NEXT_LIFE_NS: Final = 120 * NS_PER_S
"""A worker that was lost while it was drained may be started again by whoever runs it, as after any crash. For so long
its next life is drained as well."""
UNKNOWN_ATTEMPT: Final = "the coordinator does not know it"
"""Reason given with the cancellation of a leg that only its worker knows of."""
REBUILD_WINDOW_NS: Final = 5 * NS_PER_S
"""So long after the first word to a coordinator, at most, it waits for those that an earlier life knew."""
MAX_ATTEMPTS_PER_LIFE: Final = 100_000
"""Attempts at one request in one life of the coordinator. A refused reservation takes a round trip, so the deadline of
the queue comes long before."""
MAX_CHOICES: Final = 16
"""Answers that one request may ask for."""
MAX_LIVE_REQUESTS: Final = 100_000
"""Requests the coordinator knows at once, waiting and running together."""
MAX_REMEMBERED_ATTEMPTS: Final = 100_000
"""Forgotten requests whose number of attempts is remembered; the oldest are forgotten for good."""
SLOW_LINK_FRACTION: Final = 0.25
"""A link of less than so much of the median bandwidth between its two pools is warned of."""
READING_MEMORY_MS: Final = 5_000
"""The share of its time in which a worker reads prompts is a mean that forgets about so fast."""
NUM_RECENT_ROUTES: Final = 200
"""Of so many of the last placements it is counted which way they took."""
MIN_PUSHED_SHARE: Final = 0.1
"""If fewer of them are pushed, while both pools are whole, operators are warned; again only once there were twice as
many in between."""
MAX_WORKERS: Final = 4096
"""Workers registered at once."""
MAX_LOST_NAMES: Final = 16_384
"""Worker names whose lost lives are remembered, so that a lost life cannot come back; the oldest are forgotten."""
MAX_KNOWN_BLOCKS: Final = 2**21
"""Different blocks in the prefix map, at little more than the 16 bytes of a hash. Those beyond are not hit by
placement, only by luck."""
