//! Who may report what, and how everybody else is answered.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::contract::TrialConfig;
use stoker_api::experiment::Phase;
use stoker_api::names::LABEL_EXPERIMENT;

use crate::flow::grid;
use crate::kubelet::{Kubelet, Line, Script, config_of, token};
use crate::setup::{Place, free_ports, runtime};

/// A pod of a gang, and a way to the door with its token.
struct Caller {
    pod: Pod,
    config: TrialConfig,
    line: Line,
}

impl Caller {
    async fn new(place: &Place, pod: &str) -> Self {
        let pods: Api<Pod> = Api::namespaced(place.client.clone(), &place.namespace);
        let pod = loop {
            match pods.get_opt(pod).await.unwrap() {
                Some(pod) => break pod,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let config = config_of(&pod);
        let token = token(&place.client, &place.namespace, &pod).await.unwrap();
        Self { pod, line: Line::new(&config, token), config }
    }

    /// The status of a report that is sent with this token, and of the other's trial if so.
    async fn send(&self, report: &Value, token: Option<&str>, url: &str) -> (u16, String) {
        let body = report.to_string().into_bytes();
        match self.line.send(body.clone(), token, url).await {
            Some(answer) => answer,
            // The connection may have been closed after what was sent before.
            None => self.line.send(body, token, url).await.unwrap(),
        }
    }
}

fn progress(attempt: u32, batches: u64) -> Value {
    json!({
        "version": 1, "attempt": attempt, "batches": batches,
        "event": { "progress": { "batchesTotal": 100 } },
    })
}

#[test]
fn the_door_takes_what_rank_0_says_of_its_own_attempt_and_nothing_else() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("door").await;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        // The trial of `ends` is in its second attempt.
        let _kubelet = Kubelet::start(&place.client, "door", |pod| {
            let is_first = pod.name_any().starts_with("ends-0-a0");
            match pod.labels()[LABEL_EXPERIMENT].as_str() {
                "ends" if is_first => Script::Exit { after_ms: 10, code: 80 },
                _ => Script::Hang,
            }
        });
        place.apply("gang", grid(1, 100, 2));
        place.apply("ends", grid(1, 100, 1));
        place.wait_for("gang", &[Phase::Running], 20).await;
        let rank_0 = Caller::new(&place, "gang-0-a0-r0").await;
        let rank_1 = Caller::new(&place, "gang-0-a0-r1").await;
        let new = Caller::new(&place, "ends-0-a1-r0").await;
        let old = Caller::new(&place, "ends-0-a0-r0").await;
        assert_eq!((rank_0.config.attempt, new.config.attempt), (0, 1));

        let (mine, ends) = (rank_0.config.door.url.as_str(), new.config.door.url.as_str());
        let nobody = mine.replace("gang-0", "gang-9");
        let elsewhere = mine.replace("/reports", "/orders");
        let unbound = place.plane.token("door", "default", Some("stoker")).unwrap();
        let for_others = place.plane.token("door", "default", None).unwrap();
        let own = |it: &Caller| Some(it.line.token.clone());
        let cases = [
            ("rank 0", own(&rank_0), progress(0, 1), mine, 200, "continue"),
            ("no token", None, progress(0, 1), mine, 401, "no bearer token"),
            ("garbage", Some("abc".to_owned()), progress(0, 1), mine, 401, ""),
            ("long", Some("a".repeat(20_000)), progress(0, 1), mine, 401, ""),
            ("not of a pod", Some(unbound), progress(0, 1), mine, 401, "not bound to a pod"),
            ("not for us", Some(for_others), progress(0, 1), mine, 401, ""),
            ("rank 1", own(&rank_1), progress(0, 1), mine, 403, "not rank 0's"),
            ("another's pod", own(&new), progress(0, 1), mine, 403, "is not of trial"),
            ("no trial", own(&rank_0), progress(0, 1), &nobody, 403, "is not of trial"),
            ("no path", own(&rank_0), progress(0, 1), &elsewhere, 404, ""),
            ("old attempt", own(&old), progress(0, 1), ends, 200, "fenced"),
            ("old pod", own(&old), progress(1, 1), ends, 403, "is of attempt 0"),
            ("too soon", own(&new), progress(2, 1), ends, 403, "is of attempt 1"),
            ("no report", own(&rank_0), json!({ "version": 1 }), mine, 422, "missing field"),
            (
                "odd checkpoint",
                own(&rank_0),
                json!({ "version": 1, "attempt": 0, "batches": 1, "event": { "checkpointed": {
                    "name": "../../other", "manifestSha256": "0".repeat(64), "bytes": 1,
                } } }),
                mine,
                422,
                "../../other",
            ),
        ];
        for (name, token, report, url, code, says) in cases {
            let (found, text) = rank_0.send(&report, token.as_deref(), url).await;
            assert_eq!(found, code, "{name}: {text}");
            assert!(text.contains(says), "{name}: {text}");
        }
        let send =
            async |body: Vec<u8>| rank_0.line.send(body, own(&rank_0).as_deref(), mine).await;
        assert_eq!(send(b"{".to_vec()).await.unwrap().0, 422);
        // Its answer may come while it is still being sent, which is no answer then.
        let long = send(vec![b' '; 2 << 20]).await;
        assert!(long.as_ref().is_none_or(|it| it.0 == 413), "{long:?}");
        // A storm of one trial is held up, and others are not.
        let mut codes = vec![];
        for _ in 0..80 {
            codes.push(rank_0.send(&progress(0, 2), own(&rank_0).as_deref(), mine).await.0);
        }
        assert!(codes.contains(&429) && codes.contains(&200), "{codes:?}");
        assert_eq!(new.send(&progress(1, 1), own(&new).as_deref(), ends).await.0, 200);
        // A pod that is gone says nothing, however young its token is.
        let now = ["--grace-period=0", "--force", "-n", "door"];
        let name = rank_0.pod.name_any();
        place.plane.kubectl(&[&["delete", "pod", &name][..], &now].concat()).unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (code, text) = rank_0.send(&progress(0, 3), own(&rank_0).as_deref(), mine).await;
        assert!(code == 403 || code == 429 || code == 401, "{code}: {text}");
    });
}
