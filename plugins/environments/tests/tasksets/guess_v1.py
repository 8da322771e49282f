"""Tasksets of verifiers 1 with an `Env`: guess a number from hints, with or without a prompt."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def guesses(self, trace) -> float:
        return float(trace.num_turns)

    @vf.stop
    async def gave_up(self, trace) -> bool:
        return trace.last_reply == "stop"


class GuessConfig(vf.TasksetConfig):
    prompted: bool = True


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn(None if task.data.prompt else "Guess.")
            while not segment.terminated:
                if segment.last_reply == "crash":
                    raise ValueError("the engine broke")
                guess = int(segment.last_reply) if segment.last_reply.isdigit() else 0
                if guess == task.data.number:
                    won = True
                    break
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("won", float(won))


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for number in range(1, 9):
            prompt = "Guess a number from 1 to 8." if self.config.prompted else None
            yield GuessTask(
                GuessData(prompt=prompt, system_prompt="Answer with a number.", number=number), self.config.task
            )


__all__ = ["GuessEnv", "GuessTaskset"]
