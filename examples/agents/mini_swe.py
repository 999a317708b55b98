"""A program with mini-swe-agent: the policy writes bash commands, run in the working folder.

nanorl train --env answer --tasks examples/sums.jsonl --agent command \
    --agent.command "python examples/agents/mini_swe.py" --agent-args in_sandbox=true \
    --agent.max-turns 4 --agent.max-context-tokens 4096
"""

import json
import os
from pathlib import Path

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": os.getcwd(),
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # what the endpoint refuses it refuses again
}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo YOUR ANSWER"

agent = DefaultAgent(
    LitellmModel(
        model_name="openai/policy",  # litellm reads OPENAI_BASE_URL and OPENAI_API_KEY
        cost_tracking="ignore_errors",
    ),
    LocalEnvironment(timeout=5),
    system_template="You solve tasks with bash commands, one in each turn.",
    instance_template="{{task}}\nWhen you are done, run: " + SUBMIT,
    step_limit=4,
)
end = agent.run(json.loads(os.environ["NANORL_TASK"])["prompt"])
Path("answer.txt").write_text(end["submission"])
