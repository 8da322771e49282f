"""Tasksets of verifiers 1 that one answer to one prompt cannot play. The config's `fault` selects the reason."""

import itertools

import verifiers.v1 as vf


class FaultConfig(vf.TasksetConfig):
    fault: str


class Data(vf.TaskData):
    fault: str


class FaultTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return 1.0

    def hooks(self, attr):
        found = super().hooks(attr)
        if attr == "reward" and self.data.fault == "no reward":
            return []
        return [self.in_a_box] if attr == "reward" and self.data.fault == "sandbox" else found

    async def in_a_box(self, trace, runtime) -> float:
        return 1.0


class FaultTaskset(vf.Taskset[FaultTask, FaultConfig]):
    @property
    def bounded(self) -> bool:
        return self.config.fault != "infinite"

    def load(self):
        fault = self.config.fault
        if fault == "crash":
            raise ValueError("the file is missing")
        prompts = {
            "no prompt": None,
            "image": [vf.UserMessage(content=[vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url="http://x"))])],
        }
        count = itertools.count() if fault == "infinite" else range(0 if fault == "empty" else 3)
        for number in count:
            yield FaultTask(Data(prompt=prompts.get(fault, f"Task {number}"), fault=fault), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [object()] if config.fault == "tools" else []


__all__ = ["FaultTaskset"]
