"""Images that a vLLM replica lacks are sent to it."""

import asyncio
from types import SimpleNamespace

from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.replicas import EngineDied
from posttrain.recipe.engines import VllmEngineRecipe
from tests.engines.test_vllm_engine import Made, MadePolicy, ask_all


def test_an_image_is_sent_once_for_all_requests_that_wait_for_it():
    sent = []

    class Seeing(Made):
        async def generate(self, job):
            missing = [place["key"] for place in job["images"] if place["key"] not in sent]
            return {"missing": missing} if missing else await super().generate(job)

        async def receive_image(self, key, content):
            await asyncio.sleep(0.01)
            if len(sent) == 0 and self.starts == 1:
                raise EngineDied("killed")
            sent.append(content)

    class Images:
        def placed(self, ids):
            return {"prompt_ids": list(ids), "images": [{"key": "one"}, {"key": "two"}]}

        def content(self, key):
            return key

    policy = MadePolicy()
    policy.tokenizer = SimpleNamespace(images=Images())
    engine = VllmEngine(policy, VllmEngineRecipe(max_num_seqs=4), [Seeing("0")])
    engine.load_weights(0)
    assert [one.ids[0] for one in ask_all(engine, range(4))] == [5] * 4
    assert sorted(sent) == ["one", "two"]
    assert engine.restarts == 1
    engine.close()
