"""Stage 6: prove the export: its files, its weights under every likely wiring, and what the real engine feeds it.

Reads:   runs/<name>/export/, held-out samples and their hidden states
Writes:  runs/<name>/verify/verify.json, verify.html
Launch:  make verify
         make verify ARGS="verify.checks=[files,replay,wiring]"     # without an engine
         make verify ARGS="verify.draft=/drafters/other"            # another export, against this run
"""

from _stage import engine_facts, stage_main

from pipeline.config import section
from pipeline.slots import check_bound, check_trained


def depends_on(config, manifest):
    check_bound(config, manifest)
    from pipeline.verify.verify import draft_contents

    return {"layers": manifest and manifest.fc_layers(), "draft": draft_contents(config), **engine_facts(config),
            **section(config, "verify")}


def work(config, target, manifest, run_dir, folder):
    from pipeline.verify.verify import verify

    check_trained(manifest)
    return verify(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("verify", depends_on, work)
