"""Makes the prompts of data.train_function in a thread, ahead of the groups that begin: the controller answers requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hpcrl.controller.admission import Admission
from hpcrl.data.endless import EndlessPrompts
from hpcrl.errors import DataError
from hpcrl.runtime.threads import in_thread

_MOST = 1024
_LONGEST_S = 600.0


class PromptsAhead:
    """Makes prompts in the order of their groups, those of a step ahead at most, and none that the run cannot train.

    A group waits for its prompt, see `Admission.made`.

    Attributes:
        claimed: to be set when groups have begun.
    """

    def __init__(self, prompts: EndlessPrompts, admission: Admission, batch_size: int) -> None:
        self._prompts, self._admission, self._ahead = prompts, admission, min(batch_size, _MOST)
        self.claimed = asyncio.Event()

    def start(self, notify: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Return the task that makes prompts, from the first group that may begin on; it calls `notify` after each.

        The task ends with DataError when a prompt has taken ten minutes.
        """
        self._admission.made = self._admission.first
        return asyncio.create_task(self._fill(notify))

    async def _fill(self, notify: Callable[[], Awaitable[None]]) -> None:
        admission = self._admission
        while True:
            while (index := admission.made or 0) >= admission.cursor + min(self._ahead, admission.left):
                self.claimed.clear()
                await self.claimed.wait()
            try:  # the function is the user's, and may hang
                await asyncio.wait_for(in_thread(self._prompts.make, index), _LONGEST_S)
            except asyncio.TimeoutError as error:
                raise DataError(
                    f"data.train_function: row {index} is not there after {_LONGEST_S:.0f} s; mend the function"
                ) from error
            admission.made = index + 1
            self._prompts.forget(admission.is_used)
            await notify()
