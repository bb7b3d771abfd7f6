"""A taskset of `verifiers`, as one of its packages has it: the quickstart's letters, put in order."""

import verifiers.v1 as vf

WORDS = ("llabk", "cabde", "gfeda", "mbnac", "edcba", "hagfb")


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData]):
    @vf.reward(weight=1.0)
    async def sorted(self, trace: vf.Trace) -> float:
        return float(said(trace) == self.data.answer)

    @vf.metric
    async def letters_in_place(self, trace: vf.Trace) -> float:
        return sum(one == other for one, other in zip(said(trace), self.data.answer, strict=False)) / 5


class SortConfig(vf.TasksetConfig):
    pass


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    def load(self) -> list[SortTask]:
        return [
            SortTask(SortData(prompt=f"sort: {word}", answer="".join(sorted(word))), self.config.task) for word in WORDS
        ]


def said(trace: vf.Trace) -> str:
    return str(trace.assistant_messages[-1].content) if trace.assistant_messages else ""


__all__ = ["SortTaskset"]
