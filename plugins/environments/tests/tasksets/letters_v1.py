"""A taskset of verifiers 1: name the letter at a position of the alphabet."""

import verifiers.v1 as vf


class LetterData(vf.TaskData):
    letter: str


class LetterTask(vf.Task[LetterData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.letter)

    @vf.reward(weight=0.5)
    async def short(self, task, trace) -> float:
        assert trace.num_turns == 1
        assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
        return float(len(trace.last_reply) == 1)

    @vf.metric
    async def length(self, trace) -> float:
        if trace.last_reply == "crash":
            raise ValueError("no length")
        return len(trace.last_reply)


class LetterConfig(vf.TasksetConfig):
    first: int = 0


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        for position in range(self.config.first, 26):
            data = LetterData(
                prompt=f"Which letter has the number {position + 1}?",
                system_prompt="Answer with one letter.",
                letter=chr(ord("a") + position),
            )
            yield LetterTask(data, self.config.task)


__all__ = ["LetterTaskset"]
