//! Population based training: copies start from the checkpoints of other trials, which stay until
//! then.

use std::time::Duration;

use serde_json::{Value, json};
use stoker_api::experiment::Phase;
use stoker_api::trial::Trial;
use stoker_engine::trial::{TrialRecord, closed};

use crate::kubelet::{Kubelet, Script};
use crate::promotion::rebuilt;
use crate::setup::{TestNamespace, operator_port, runtime};
use crate::trainer::config_of;

/// Four trials train three rounds of six batches, with a checkpoint at each batch. One of them is
/// replaced after each round.
fn population() -> Value {
    json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": { "x": { "double": { "min": 0.0, "max": 1.0 } } },
        "searcher": {
            "metric": "loss",
            "pbt": {
                "populationSize": 4, "lengthPerRound": { "batches": 6 }, "numRounds": 3,
                "truncateFraction": 0.25,
            },
        },
        "checkpointStorage": { "saveTrialBest": 0 },
        "reproducibility": { "experimentSeed": 5 },
    })
}

/// Checks that the sources of copies that have not started keep their checkpoints. Returns the
/// number of such copies. `trials` is a list at one point in time.
fn check_sources(trials: &[Trial]) -> usize {
    let mut num_waiting = 0;
    for trial in trials {
        let Some(source) = &trial.spec.source else { continue };
        let status = trial.status.clone().unwrap_or_default();
        let record = TrialRecord { spec: trial.spec.clone(), status };
        if !record.status.checkpoints.is_empty() || closed(&record).is_some() {
            continue;
        }
        num_waiting += 1;
        let name = source.checkpoint.as_ref().unwrap();
        let of_source = trials.iter().find(|other| other.spec.index == source.trial).unwrap();
        assert!(of_source.spec.pins.contains(name), "{:?}", of_source.spec);
        let checkpoints = &of_source.status.as_ref().unwrap().checkpoints;
        assert!(checkpoints.iter().any(|checkpoint| checkpoint.name == *name), "{checkpoints:?}");
    }
    num_waiting
}

/// With room for one pod, copies start last, when their sources have saved more checkpoints than
/// are kept.
#[test]
fn copies_start_from_checkpoints_that_are_kept() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("population").await;
        let ports = operator_port();
        let mut operator = ns.operator("a", ports);
        operator.wait_ready(&ns);
        let script = |_: &_| Script::Train { unit_ms: 20 };
        let kubelet = Kubelet::with_capacity(&ns.client, &ns.namespace, 1, script);
        ns.apply("population", population());
        // The operator dies when the first copy exists.
        let mut num_waiting = 0;
        let mut is_first = true;
        let ended = loop {
            let trials = ns.trials_of("population").await;
            num_waiting += check_sources(&trials);
            if trials.len() == 5 && std::mem::take(&mut is_first) {
                operator.kill();
                operator = ns.operator("b", ports);
                operator.wait_ready(&ns);
            }
            let experiment = ns.experiment("population").await;
            let phase = experiment.status.as_ref().map(|status| status.phase);
            if phase.is_some_and(Phase::is_terminal) {
                break experiment;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let status = ended.status.unwrap();
        assert_eq!((status.phase, status.trials_created), (Phase::Completed, 6), "{}", ns.logs());
        assert!(num_waiting > 0, "no copy has waited for its start");
        assert!(rebuilt(&ns, "population").await.book().is_finished());
        for trial in ns.trials_of("population").await {
            let index = trial.spec.index;
            assert_eq!(trial.spec.pins, Vec::<String>::new(), "trial {index}");
            let Some(source) = trial.spec.source else { continue };
            assert_eq!(source.units, 6 * (u64::from(index) - 3), "trial {index}");
            let pod = kubelet.pod(&format!("population-{index}-a0-r0")).unwrap();
            let config = config_of(&pod);
            let [from] = &config.resume_from[..] else { panic!("{:?}", config.resume_from) };
            assert_eq!(Some(&from.name), source.checkpoint.as_ref());
            assert_eq!(Some(&from.manifest_sha256), source.manifest_sha256.as_ref());
            let (folder, _) = config.storage.trial_path.rsplit_once('/').unwrap();
            assert_eq!(from.trial_path, Some(format!("{folder}/{}", source.trial)));
        }
    });
}
