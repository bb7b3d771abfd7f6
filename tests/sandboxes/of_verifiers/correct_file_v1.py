"""A taskset of `verifiers`, as one of its packages has it: a file is to be corrected, and commands in the task's container decide."""

import verifiers.v1 as vf


class FileData(vf.TaskData):
    wanted: str


class FileTask(vf.Task[FileData]):
    def runtime_env(self) -> dict[str, str]:
        return {"NAME": "answer.txt"}

    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("answer.txt", b"5\n")
        await runtime.run_background(["sh", "-c", "echo $NAME; sleep 600"], {}, "log")

    @vf.reward(weight=1.0)
    async def corrected(self, runtime: vf.Runtime) -> float:
        tests = await runtime.run(["sh", "-c", 'test "$(cat $NAME)" = "$WANTED"'], {"WANTED": self.data.wanted})
        return float(tests.exit_code == 0)

    @vf.metric
    async def length(self, runtime: vf.Runtime) -> float:
        return float(len(await runtime.read("/repo/answer.txt", max_bytes=100)))

    @vf.metric
    async def background(self, runtime: vf.Runtime) -> float:
        return float(await runtime.read("log") == b"answer.txt\n")


class FileConfig(vf.TasksetConfig):
    pass


class FileTaskset(vf.Taskset[FileTask, FileConfig]):
    def load(self) -> list[FileTask]:
        prompt, image = "Correct answer.txt.", "tiny:1.0"
        data = FileData(prompt=prompt, image=image, workdir="/repo", network_allow=[], wanted="it's 4")
        return [FileTask(data, self.config.task)]


__all__ = ["FileTaskset"]
