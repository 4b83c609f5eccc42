"""`python -m tests.engine.fake_core`: the real core process around the runner without a model.

Prompts that hold these tokens make it misbehave: that is how the client's tests break the core at a chosen moment.
"""

import os
import socket
import sys
import time

from engine.assembly import build_scheduler
from engine.config import EngineConfig
from engine.core import EngineCore, main
from engine.messages import Ready
from engine.types import StepPlan
from tests.engine.fakes import EOS, FakeRunner, make_grammars

FAIL_STEP, CRASH, HANG, FAIL_ROW, SLOW = range(901, 906)


def load(config: EngineConfig, connection: socket.socket) -> tuple[EngineCore, Ready]:
    if config.model_path == "broken":
        raise ValueError("this model cannot be loaded")
    digest = config.model_path.encode()
    runner = FakeRunner(num_blocks=257, max_model_len=1000)

    def misbehave(plan: StepPlan) -> None:
        for row in plan.rows:
            prompt = row.all_token_ids[: row.num_prompt_tokens]
            if FAIL_STEP in prompt:
                raise RuntimeError("the step fails as told")
            if CRASH in prompt:
                os._exit(3)
            if HANG in prompt:
                time.sleep(3600)
            if FAIL_ROW in prompt:
                runner.row_errors[row.request_id] = "the row fails as told"
            if SLOW in prompt:
                time.sleep(0.005)

    runner.before_step = misbehave
    core = EngineCore(runner, build_scheduler(config, runner, b"fake", frozenset({EOS})), connection, make_grammars())
    return core, core.ready(digest, 0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load))
