"""Stage 6: prove the export: replay its files independently, and serve them in the real engine.

Reads:   runs/<name>/export/, held-out samples and their hidden states
Writes:  runs/<name>/verify/verify.json
Launch:  make verify
         make verify ARGS="verify.checks=[replay]"
"""

from _stage import engine_facts, stage_main

from pipeline.config import section
from pipeline.slots import check_bound, check_trained


def depends_on(config, manifest):
    check_bound(config, manifest)
    return {"layers": manifest and manifest.fc_layers(), **engine_facts(config), **section(config, "verify")}


def work(config, target, manifest, run_dir, folder):
    from pipeline.verify import verify

    check_trained(manifest)
    return verify(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("verify", depends_on, work)
