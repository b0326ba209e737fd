"""Pages of the targets that are not pipelines: eval/results/classification.md, clip.md, vae.md"""

from __future__ import annotations

import json
import math
from typing import Any

from tools.rendering.common import RESULTS, setting, table


def spread(values: list[float], digits: int = 1) -> str:
    """Mean and standard deviation over seeds."""
    kept = [v for v in values if v is not None and math.isfinite(v)]
    if not kept:
        return "-"
    mean = sum(kept) / len(kept)
    deviation = (sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)) ** 0.5 if len(kept) > 1 else float("nan")
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if len(kept) > 1 else f"{mean:.{digits}f}"


def _files(study: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / study).glob("*.json"))]


def _foot(content: dict[str, Any]) -> str:
    environment = content["environment"]
    made = sorted({str(row.get("environment", environment)["commit"])[:12] for row in content.get("rows", [content])})
    return f"Commit{'s' if len(made) > 1 else ''} {', '.join(made)}; torch {environment['versions']['torch']}; {environment['device']}, {environment['threads']} thread(s)."  # fmt: skip


def _notes(study: str) -> str:
    path = RESULTS / study / "notes.md"
    return path.read_text().rstrip() + "\n\n" if path.exists() else ""


COLUMNS = """Mean ± standard deviation over the seeds, in percent. MIA: share of forgotten examples that a membership attack (logistic on
the confidence) calls non-members; attack: its own balanced accuracy, 50 being no attack at all. AUC: forgotten against test
examples of the same classes by the loss, 0.5 being no trace. LiRA: share of forgotten examples that shadow models call
trained on. Gap: mean absolute difference of the first four columns to Retrain of the same seed. RTE: time over Retrain's."""


def classification(study: str = "classification", what: str = "a classifier of handwritten digits") -> str:
    """The field's table: a task a table, mean and standard deviation over the seeds."""
    parts = [f"# Forgetting from {what}", "", f"Rendered from `{study}/*.json` by `python -m tools.render_results`; made by `python -m tools.classify eval/studies/{study}.yaml`.", COLUMNS, ""]  # fmt: skip
    order = {"class": 0, "half": 1, "random_10": 2, "random_50": 3}
    for content in sorted(_files(study), key=lambda c: order.get(c["task"], 9)):
        n = content["n"]
        rows = [["method", "Acc_Df", "Acc_Dr", "Acc_Dt", "MIA", "avg. gap", "attack", "AUC", "LiRA", "RTE", "setting"]]
        for row in content["rows"]:
            column = {k: [run[k] for run in row["runs"]] for k in row["runs"][0]}
            rows.append([row["label"], *(spread(column[k]) for k in ("forget", "retain", "test", "mia")), spread(column["gap"], 2), spread(column["attack"]), spread(column["auc"], 2), spread(column["lira"], 0), spread(column["rte"], 2), setting(row["point"]) if row.get("point") else ""])  # fmt: skip
        seeds = content["seeds"]
        parts += [f"## {content['label']}", "", f"{n['forget']} forgotten, {n['retain']} retained, {n['test']} test examples; {len(seeds)} seeds; {content['shadows']} shadow models a side.", "", table(rows), ""]  # fmt: skip
        parts += [f"{label} did not end: {reason}" for label, reason in content.get("failed", {}).items()]
        parts += [_foot(content), ""]
    return "\n".join(parts) + "\n" + _notes(study)


def classification_painted() -> str:
    return classification("classification_painted", "a ResNet of painted shapes")


def clip() -> str:
    """Zero-shot accuracies after scrubbing, and what the pipeline draws with the scrubbed text tower."""
    parts = ["# Scrubbing shapes from the small CLIP", "", "Rendered from `clip/*.json` by `python -m tools.render_results`; made by `python -m tools.scrub_clip eval/studies/clip.yaml`.", "Zero-shot accuracy in percent, mean ± standard deviation over the seeds. Colour and style are labels that the training never", "used. Drawn: pictures by tiny-sd with the scrubbed text tower, share that shows the asked shape; FID to the original's pictures.", ""]  # fmt: skip
    for content in _files("clip"):
        rows = [["method", "setting", "Acc_Df", "Acc_Dr", "Acc_Dt", "colour", "style", "drawn: forgotten %", "drawn: others %", "FID to the original's", "training s"]]  # fmt: skip
        for row in content["rows"]:
            accuracy = [[100 * run["accuracy"][k]["value"] for run in row["runs"]] for k in ("forget", "retain", "test", "color", "style")]  # fmt: skip
            drawn = [run["drawn"] for run in row["runs"] if "drawn" in run]
            gone = [100 * sum(d[c]["shown"] for c in content["classes"]) / len(content["classes"]) for d in drawn]
            kept = [100 * sum(v["shown"] for k, v in d.items() if k not in content["classes"]) / (len(d) - len(content["classes"])) for d in drawn]  # fmt: skip
            rows.append([row["label"], setting(row.get("point") or {"training.lr": row["lr"]}) if {"point", "lr"} & set(row) else "", *(spread(a) for a in accuracy), spread(gone), spread(kept), spread([run.get("fid_to_original") for run in row["runs"]]), spread([run.get("seconds") for run in row["runs"]], 0)])  # fmt: skip
        n = content["rows"][0]["runs"][0]["accuracy"]
        parts += [f"## {content['label'][0].upper()}{content['label'][1:]}: {', '.join(content['classes'])}", "", f"{n['forget']['n']} forgotten, {n['retain']['n']} retained, {n['test']['n']} test pictures; {content['settings']['pictures']} drawn a shape; seeds {content['seeds']}.", "", table(rows), "", _foot(content), ""]  # fmt: skip
    return "\n".join(parts) + "\n" + _notes("clip")


def vae() -> str:
    """UNO's Tables 1 and 2 on the sets at hand."""
    parts = ["# Unlearning a class in a VAE: UNO's benchmark", "", "Rendered from `vae/*.json` by `python -m tools.render_results`; made by `python -m tools.vae_unlearn --data fonts` (and `digits`).", "Time to unlearn: training time until the share of the class among prior samples is first below 2 %, looks not counted,", "interpolated. Mean ± standard deviation over the runs. FID on the classifier's features, against pictures of the other classes.", ""]  # fmt: skip
    for path in sorted((RESULTS / "vae").glob("*.json")):
        content = json.loads(path.read_text())
        settings, original = content["settings"], content["original"]
        rows = [["algorithm", "reached", "steps to < 2 %", "seconds to < 2 %", "FID there", "FID at the end", "share at the end %", "ms a step", "peak memory over the start, MB"]]  # fmt: skip
        for name, found in content["algorithms"].items():
            column = {k: [run[k] for run in found["runs"]] for k in found["runs"][0] if k != "looks"}
            reached = sum(s is not None for s in column["steps"])
            rows.append([name.replace("^", "\\^"), f"{reached} of {len(found['runs'])}", spread(column["steps"]), spread(column["seconds"], 3), spread(column["fid_there"]), spread(column["fid"]), spread([100 * s for s in column["share"]]), spread([1000 * s for s in column["per_step"]]), f"{found['memory_mb'] - found['memory_before_mb']:.0f}"])  # fmt: skip
        parts += [f"## {content['data']}: class {settings['class']}" + (", running statistics frozen" if settings["batchnorm"] == "frozen" else ""), "", f"Original: {100 * original['share']:.1f} % of prior samples show it, FID {original['fid']:.1f}; the classifier is right on {100 * original['judge_accuracy']:.1f} % of test pictures.", "", table(rows), "", f"![trajectories](vae/{path.stem}.png)", "", _foot(content), ""]  # fmt: skip
    return "\n".join(parts) + "\n" + _notes("vae")


PAGES = {"classification": classification, "classification_painted": classification_painted, "clip": clip, "vae": vae}
