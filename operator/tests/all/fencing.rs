//! Reports of replaced and deleted pods are fenced, even if a new object has the old name.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::json;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;

use crate::setup::runtime;
use crate::standby::{Standby, UNITS, poll_until, progress, validated};

#[test]
fn replaced_and_deleted_pods_are_fenced() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("fences", &[]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 1).await;
        let old = standby.add_pod("one-0", &trial, 0, 0).await;
        let live = standby.add_pod("one-0", &trial, 1, 0).await;
        let fenced = (200, "\"fenced\"".to_owned());
        let go = (200, json!({ "continue": { "units": UNITS } }).to_string());
        assert_eq!(live.send(&progress(1, 1)).await, go);
        // The pod's attempt counts, not the attempt in the report.
        for attempt in [0, 1, 2] {
            let report = validated(attempt, UNITS, "0.1", Some(UNITS));
            assert_eq!(old.send(&report).await, fenced, "attempt {attempt}");
        }
        // An ended attempt is fenced before the next one starts.
        let attempts = json!([{ "number": 0, "end": "UserError" },
            { "number": 1, "end": "Infrastructure" }]);
        standby.set_status::<Trial>("one-0", &json!({ "attempts": attempts })).await;
        let ended = async || match live.send(&progress(1, 2)).await {
            answer if answer == fenced => Ok(()),
            answer => Err(format!("{answer:?}")),
        };
        poll_until("the fence of an ended attempt", ended).await;
        // A deleted pod is fenced too, even if nothing else has changed in its attempt.
        standby.set_status::<Trial>("one-0", &json!({ "attempts": [{ "number": 2 }] })).await;
        let deleted = standby.add_pod("one-0", &trial, 2, 0).await;
        assert_eq!(deleted.send(&progress(2, 3)).await, go);
        standby.delete::<Pod>("one-0-a2-r0").await;
        poll_until("the fence of a deleted pod", async || {
            match deleted.send(&progress(2, 4)).await {
                answer if answer == fenced => Ok(()),
                answer if answer == go => Err("the pod is still cached".to_owned()),
                answer => panic!("{answer:?}"),
            }
        })
        .await;
        // A new pod with the same name is a different pod.
        let again = standby.add_pod("one-0", &trial, 2, 0).await;
        assert_eq!(deleted.send(&progress(2, 5)).await, fenced);
        assert_eq!(again.send(&progress(2, 5)).await, go);
        assert_eq!(standby.trial_status("one-0").await.facts, []);
    });
}

#[test]
fn report_of_deleted_trial_does_not_reach_namesake() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("namesakes", &[]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let old = standby.add_pod("one-0", &trial, 0, 0).await;
        let fenced = (200, "\"fenced\"".to_owned());
        // The trial is replaced between the check of its pod and the write.
        let (reached, release) = standby.proxy.hold("/trials/one-0/status");
        let result = validated(0, UNITS, "0.1", Some(UNITS));
        let swap = async {
            reached.await.unwrap();
            standby.delete::<Trial>("one-0").await;
            let trial = standby.add_trial("one", &owner, 0).await;
            release.send(()).unwrap();
            trial
        };
        let (answer, trial) = tokio::join!(old.send(&result), swap);
        assert_eq!(answer, fenced);
        assert_eq!(standby.trial_status("one-0").await.facts, []);
        // Later reports of the old pod are fenced too.
        assert_eq!(old.send(&result).await, fenced);
        // The new trial's pod sends a result and waits for a decision while its trial is replaced.
        let pod = poll_until("the old pod to be collected", async || {
            match standby.api::<Pod>().get_opt("one-0-a0-r0").await.unwrap() {
                Some(pod) => Err(pod.name_any()),
                None => Ok(standby.add_pod("one-0", &trial, 0, 0).await),
            }
        })
        .await;
        let swap = async {
            poll_until("the result to be recorded", async || {
                match standby.trial_status("one-0").await.facts.len() {
                    1 => Ok(()),
                    num => Err(num.to_string()),
                }
            })
            .await;
            standby.delete::<Trial>("one-0").await;
            standby.add_trial("one", &owner, 0).await
        };
        let (answer, _) = tokio::join!(pod.send(&result), swap);
        assert_eq!(answer, fenced);
        assert_eq!(standby.trial_status("one-0").await.facts, []);
    });
}

#[test]
fn report_of_deleted_job_does_not_reach_namesake() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("job-namesakes", &[]).await;
        let job = standby.add_job("one").await;
        let old = standby.add_planner("one", &job).await;
        let (reached, release) = standby.proxy.hold("/inferencejobs/one/status");
        let swap = async {
            reached.await.unwrap();
            standby.delete::<InferenceJob>("one").await;
            standby.add_job("one").await;
            release.send(()).unwrap();
        };
        let planned = progress(0, 0);
        let (answer, ()) = tokio::join!(old.send(&planned), swap);
        assert_eq!(answer, (200, "\"fenced\"".to_owned()));
        let status = standby.job_status("one").await;
        assert!(!status.reported && status.rows_total == 0, "{status:#?}");
        assert_eq!(old.send(&planned).await, (200, "\"fenced\"".to_owned()));
    });
}
