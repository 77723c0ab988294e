"""Makes a trainer of verl's whole configuration, as its task runner does, and tells its words."""

import json
import os
import sys


def main(cases, version, taken):
    if version or taken:
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # loaded by hand, below
    import verl
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    said = {}
    if taken:
        register_trainer("segment_sync")(type("Other", (PPOTrainerSync,), {}))
    if version:
        verl.__version__ = version
    if version or taken:
        import segcredit.integrations.verl.plugin  # noqa: F401
    with initialize_config_module("verl.trainer.config", version_base=None):
        for name, overrides in cases.items():
            config = compose("ppo_trainer", overrides)
            try:
                get_trainer_cls(config.trainer.v1.trainer_mode)(config)
                said[name] = "nothing"
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    print("SAID " + json.dumps(said))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
