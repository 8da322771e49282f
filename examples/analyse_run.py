"""The metrics and episodes of a run as pandas tables: `python examples/analyse_run.py runs/RUN`.

Tables need pandas: `pip install 'posttrain[pandas]'`.
"""

import sys

import posttrain

if __name__ == "__main__":
    run = posttrain.Result.open(sys.argv[1] if len(sys.argv) > 1 else "runs/run")
    metrics = run.metrics_table()
    columns = [name for name in ("rollout/return", "rollout/success", "policy/entropy", "time/step") if name in metrics]
    print(metrics[columns].describe().loc[["mean", "min", "max"]].round(3))

    episodes = run.episodes_table()
    print(episodes.groupby("step")[["return", "tokens", "turns"]].mean().round(2))
    print(episodes.sort_values("return").iloc[[0, -1]][["step", "seed", "return", "answer"]])

    for row in run.evaluation:
        print(row["policy"], {key: row[key] for key in ("success", "success_low", "success_high", "n") if key in row})
    print(f"best step: {run.best_step}; warnings: {len(run.warnings)}")
