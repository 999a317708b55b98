"""`ModelCheck`: what the proof of a model folder found, as a table. No weight is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoengine.model.config import ModelConfig
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.choose import client_tool_chat
from nanorl.inspection.doctor.conversations import TOOL
from nanorl.inspection.doctor.preconditions import template_findings
from nanorl.inspection.doctor.template_proof import Proof, proof_findings, prove
from nanorl.observability.alarms.finding import Finding, Severity, in_order
from nanorl.options.run_kind import folder_sees

_WIDTH = 26


@dataclass(kw_only=True)
class ModelCheck:
    """A folder, how its model calls tools, and what came of each conversation."""

    folder: Path
    form: str = ""
    proofs: list[Proof] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    of_pictures: list[Finding] = field(default_factory=list)
    """Those of them that no conversation tells."""

    @property
    def is_trainable(self) -> bool:
        return all(one.severity is not Severity.ERROR for one in self.findings)

    @property
    def verdict(self) -> str:
        num_exact = sum(one.outcome == "exact" for one in self.proofs)
        count = f"{num_exact} of {len(self.proofs)} conversations are exact"
        if not self.is_trainable:
            return f"cannot be trained so: {count}"
        return count if num_exact == len(self.proofs) else f"{count}; mind the others"

    def text(self) -> str:
        """A line a conversation; those that are not exact say which line of the template it is."""
        lines = [str(self.folder), *([self.form] if self.form else [])]
        if self.proofs:
            peer = " = transformers" if self.proofs[0].has_peer else ""
            lines += ["", f"{'conversation':<{_WIDTH}}rollout = trained = served{peer}"]
        for proof in self.proofs:
            severity = "" if proof.severity is None else f"  ({proof.severity.name.lower()})"
            lines.append(f"{proof.name:<{_WIDTH}}{proof.outcome}{severity}")
            lines += [f"{'':<4}{proof.where}"] if proof.where else []
        told = self.of_pictures if self.proofs else self.findings
        lines += [one.text() for one in told]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "form": self.form,
            "verdict": self.verdict,
            "conversations": [
                {"name": one.name, "outcome": one.outcome, "where": one.where}
                for one in self.proofs
            ],
            "findings": [one.to_json() for one in self.findings],
        }


def check_model(folder: Path) -> ModelCheck:
    """Prove a model folder. `ValueError` where its tokenizer cannot be read."""
    tokenizer = ChatTokenizer.from_folder(folder)
    check = ModelCheck(folder=folder, findings=template_findings(tokenizer))
    if any(one.name in ("no_template", "bad_template") for one in check.findings):
        return check
    check.of_pictures = _of_pictures(folder, tokenizer)
    check.form = _form(tokenizer)
    check.proofs = prove(tokenizer)
    found = [*check.findings, *check.of_pictures, *proof_findings(check.proofs)]
    check.findings = in_order(found)
    return check


def _of_pictures(folder: Path, tokenizer: ChatTokenizer) -> list[Finding]:
    """Say what the template does with pictures, where the model sees."""
    if not folder_sees(folder):
        return []
    # here: few models see
    from nanoengine.vision.seeing_config import SeeingConfig
    from nanorl.inspection.doctor.picture_findings import picture_template_findings

    config = ModelConfig.from_hf_dict(json.loads((folder / "config.json").read_text("utf-8")))
    assert isinstance(config, SeeingConfig), "as of every family that sees"
    return picture_template_findings(tokenizer, config)


def _form(tokenizer: ChatTokenizer) -> str:
    chat = client_tool_chat(tokenizer, [TOOL])
    who = "described in the system message" if chat.schemas is None else "listed by the template"
    ends = " ".join(sorted(tokenizer.decode([one]) for one in tokenizer.eos_ids))
    return f"tools: {who}, calls as {chat.parser.name}; a turn ends with: {ends}"
