//! The report server: permitted callers, and responses to other requests.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::contract::TrialConfig;
use stoker_api::experiment::Phase;
use stoker_api::names::{COMPONENT_TRIAL, LABEL_COMPONENT, LABEL_EXPERIMENT, LABEL_TRIAL};

use crate::flow::grid;
use crate::kubelet::{Kubelet, Script};
use crate::proxy::Reviews;
use crate::setup::{TestNamespace, operator_port, runtime};
use crate::standby::{Sender, Standby, UNITS, poll_until, progress, validated};
use crate::trainer::{ReportConnection, config_of, token};

/// Number of concurrent reports of a pod, far more than the 40 that it may send at once.
const REPORTS: usize = 200;

/// A pod's configuration, and a connection to the report server with its token.
struct Caller {
    config: TrialConfig,
    connection: ReportConnection,
}

impl Caller {
    async fn new(ns: &TestNamespace, pod: &str) -> Self {
        let pods: Api<Pod> = Api::namespaced(ns.client.clone(), &ns.namespace);
        let pod = poll_until(pod, async || {
            pods.get_opt(pod).await.unwrap().ok_or_else(|| "it does not exist".to_owned())
        })
        .await;
        let config = config_of(&pod);
        let token = token(&ns.client, &ns.namespace, &pod).await.unwrap();
        Self { connection: ReportConnection::new(&config, token), config }
    }

    /// Sends a report with any token to any URL, and returns status and text of the response.
    async fn send(&self, report: &Value, token: Option<&str>, url: &str) -> (u16, String) {
        let body = report.to_string().into_bytes();
        match self.connection.send(body.clone(), token, url).await {
            Some(answer) => answer,
            // The server may have closed the connection after the previous request.
            None => self.connection.send(body, token, url).await.unwrap(),
        }
    }
}

/// Report of a checkpoint whose name would leave the trial's directory.
fn odd_checkpoint() -> Value {
    json!({ "version": 1, "attempt": 0, "batches": 1, "event": { "checkpointed": {
        "name": "../../other", "manifestSha256": "0".repeat(64), "bytes": 1,
    } } })
}

/// Checks that malformed, long and too many reports are rejected, without affecting `other`.
async fn check_limits(rank_0: &Caller, other: &Caller) {
    let url = rank_0.config.report_endpoint.url.as_str();
    let token = Some(rank_0.connection.token.as_str());
    let send = async |body: Vec<u8>| rank_0.connection.send(body, token, url).await;
    assert_eq!(send(b"{".to_vec()).await.unwrap().0, 422);
    // The server may respond while the body is still being sent, and the client then fails.
    let long = send(vec![b' '; 2 << 20]).await;
    assert!(long.as_ref().is_none_or(|(code, _)| *code == 413), "{long:?}");
    // Sent one after another, they would not exceed the limit on a busy machine.
    let body = progress(0, 2).to_string().into_bytes();
    let sent = (0..REPORTS).map(|_| rank_0.connection.send(body.clone(), token, url));
    let answers = futures::future::join_all(sent).await;
    let codes: Vec<u16> = answers.into_iter().flatten().map(|(code, _)| code).collect();
    assert!(codes.contains(&429) && codes.contains(&200), "{codes:?}");
    let (url, token) = (&other.config.report_endpoint.url, &other.connection.token);
    assert_eq!(other.send(&progress(1, 1), Some(token.as_str()), url).await.0, 200);
}

#[test]
fn reports_need_rank_0_of_the_live_attempt() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("door").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        // The trial of `ends` is in its second attempt.
        let _kubelet = Kubelet::start(&ns.client, "door", |pod| {
            let is_first = pod.name_any().starts_with("ends-0-a0");
            match pod.labels()[LABEL_EXPERIMENT].as_str() {
                "ends" if is_first => Script::Exit { after_ms: 10, code: 80 },
                _ => Script::Hang,
            }
        });
        ns.apply("gang", grid(1, 100, 2));
        ns.apply("ends", grid(1, 100, 1));
        ns.wait_for("gang", &[Phase::Running]).await;
        let rank_0 = Caller::new(&ns, "gang-0-a0-r0").await;
        let rank_1 = Caller::new(&ns, "gang-0-a0-r1").await;
        let new = Caller::new(&ns, "ends-0-a1-r0").await;
        let old = Caller::new(&ns, "ends-0-a0-r0").await;
        assert_eq!((rank_0.config.attempt, new.config.attempt), (0, 1));

        let gang_url = rank_0.config.report_endpoint.url.as_str();
        let ends_url = new.config.report_endpoint.url.as_str();
        let missing_url = gang_url.replace("gang-0", "gang-9");
        let wrong_path = gang_url.replace("/reports", "/orders");
        let unbound = ns.plane.token("door", "default", Some("stoker")).unwrap();
        let for_others = ns.plane.token("door", "default", None).unwrap();
        let token_of = |caller: &Caller| Some(caller.connection.token.clone());
        let other_trial = "does not belong to trial";
        let cases = [
            ("rank 0", token_of(&rank_0), progress(0, 1), gang_url, 200, "continue"),
            ("no token", None, progress(0, 1), gang_url, 401, "no bearer token"),
            ("garbage", Some("abc".to_owned()), progress(0, 1), gang_url, 401, ""),
            ("long", Some("a".repeat(20_000)), progress(0, 1), gang_url, 401, ""),
            ("not of a pod", Some(unbound), progress(0, 1), gang_url, 401, "not bound to a pod"),
            ("not for us", Some(for_others), progress(0, 1), gang_url, 503, "audiences"),
            ("rank 1", token_of(&rank_1), progress(0, 1), gang_url, 403, "does not run rank 0"),
            ("another's pod", token_of(&new), progress(0, 1), gang_url, 403, other_trial),
            ("no trial", token_of(&rank_0), progress(0, 1), &missing_url, 403, other_trial),
            ("no path", token_of(&rank_0), progress(0, 1), &wrong_path, 404, ""),
            ("old attempt", token_of(&old), progress(0, 1), ends_url, 200, "fenced"),
            ("old pod", token_of(&old), progress(1, 1), ends_url, 200, "fenced"),
            ("too soon", token_of(&new), progress(2, 1), ends_url, 403, "belongs to attempt 1"),
            (
                "no report",
                token_of(&rank_0),
                json!({ "version": 1 }),
                gang_url,
                422,
                "missing field",
            ),
            ("odd checkpoint", token_of(&rank_0), odd_checkpoint(), gang_url, 422, "../../other"),
        ];
        for (name, token, report, url, code, expected) in cases {
            let (status, text) = rank_0.send(&report, token.as_deref(), url).await;
            assert_eq!(status, code, "{name}: {text}");
            assert!(text.contains(expected), "{name}: {text}");
        }
        check_limits(&rank_0, &new).await;
    });
}

#[test]
fn a_failed_token_review_is_an_outage() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("reviews", &[]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let sender = standby.add_pod("one-0", &trial, 0, 0).await;
        let check = async |reviews: Reviews, code: u16, expected: &str| {
            standby.proxy.set_reviews(reviews.clone());
            let (status, wait, text) = sender.send_for_wait(&progress(0, 1)).await;
            assert!(status == code && text.contains(expected), "{reviews:?}: {status} {text}");
            assert_eq!(wait.is_some(), code == 503, "{reviews:?}");
        };
        let failed = |error: &str| Reviews::Status(json!({ "error": error }));
        // None of these results is cached: each report causes another review of the same token.
        check(failed("the key is not known yet"), 503, "the key is not known yet").await;
        check(Reviews::Code(500), 503, "the token cannot be checked").await;
        check(Reviews::Code(403), 503, "the token cannot be checked").await;
        check(Reviews::Hang, 503, "no response within 5 s").await;
        check(Reviews::Real, 200, "continue").await;
        // A cached success remains valid while reviews fail.
        check(failed("away"), 200, "continue").await;
        let num_reviews = standby.proxy.num_reviews();
        // Another token of the same pod is rejected, and the rejection is cached for a while.
        let sender = standby.sender(sender.pod, "trials", "one-0").await;
        standby.proxy.set_reviews(Reviews::Status(json!({ "authenticated": false })));
        for _ in 0..2 {
            let (code, wait, text) = sender.send_for_wait(&progress(0, 1)).await;
            assert_eq!((code, wait), (401, None), "{text}");
        }
        assert_eq!(standby.proxy.num_reviews(), num_reviews + 1);
        assert_eq!(standby.trial_status("one-0").await.facts, []);
    });
}

#[test]
fn pods_of_other_names_are_refused() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("names", &[]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let labels = json!({ LABEL_TRIAL: "one-0", LABEL_COMPONENT: COMPONENT_TRIAL });
        let of_trial = ("Trial", "one-0", trial.as_str());
        let cases = [
            ("other", of_trial, 0, "does not belong to trial"),
            ("one-0-a0-r00", of_trial, 0, "does not belong to trial"),
            ("one-0-a0-r0-x", of_trial, 0, "does not belong to trial"),
            // The name contradicts the labels.
            ("one-0-a1-r0", of_trial, 0, "does not belong to trial"),
            // A pod with the right name that a user created.
            ("one-0-a2-r0", ("Trial", "one-0", ""), 2, "does not belong to trial"),
            ("one-0-a0-r1", of_trial, 0, "does not run rank 0"),
        ];
        for (name, owner, attempt, expected) in cases {
            let sender = standby.add_named_pod(name, labels.clone(), owner, (attempt, 0)).await;
            let report = validated(0, UNITS, "0.1", Some(UNITS));
            let (code, text) = sender.send(&report).await;
            assert!(code == 403 && text.contains(expected), "{name}: {code} {text}");
        }
        assert_eq!(standby.trial_status("one-0").await.facts, []);
    });
}

/// Sends the result of `one-0` until it is recorded. The response would be a long poll.
async fn record_result(standby: &Standby, sender: &Sender, result: &Value) {
    let recorded =
        poll_until("the result", async || match standby.trial_status("one-0").await.facts.len() {
            1 => Ok(()),
            num => Err(num.to_string()),
        });
    tokio::select! {
        answer = sender.send(result) => assert_eq!(answer, (200, "\"wait\"".to_owned())),
        () = recorded => {}
    }
}

#[test]
fn validations_without_effect_share_a_write() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("validations", &[]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let sender = standby.add_pod("one-0", &trial, 0, 0).await;
        let send = async |report: Value| {
            // A pod may send 20 reports per second.
            loop {
                match sender.send(&report).await {
                    (429, _) => tokio::time::sleep(Duration::from_millis(100)).await,
                    (code, text) => break assert_eq!(code, 200, "{text}"),
                }
            }
        };
        let status = async || standby.trial_status("one-0").await;
        let writes = || standby.metric("stoker_api_writes_total{kind=\"trial_status\"}");
        // The first validation and each better one are recorded before the response.
        for (batches, loss) in [(1, "0.9"), (2, "0.8"), (3, "0.7")] {
            send(validated(0, batches, loss, None)).await;
            assert_eq!(status().await.best_metric.as_deref(), Some(loss));
        }
        assert_eq!(writes(), 3);
        for batches in 4..=100 {
            send(validated(0, batches, &format!("1.{batches}"), None)).await;
        }
        // Each hold interval has at most two writes, and only a few intervals fit into the loop.
        let num_writes = writes();
        assert!(num_writes <= 3 + 97 / 4, "{num_writes} writes");
        assert!(standby.metric("stoker_reports_total{answer=\"Held\"}") >= 70);
        // The last validation is recorded without another report.
        poll_until("the last validation", async || match status().await {
            status if status.metrics["loss"] == "1.100" => Ok(()),
            status => Err(format!("{:?}", status.metrics)),
        })
        .await;
        assert_eq!(status().await.batches, 100);
        // The next write also records the held validation, in the order of training.
        send(validated(0, 101, "1.101", None)).await;
        send(validated(0, 102, "1.102", None)).await;
        let result = validated(0, UNITS, "0.75", Some(UNITS));
        record_result(&standby, &sender, &result).await;
        let status = status().await;
        assert_eq!((status.batches, status.metrics["loss"].as_str()), (102, "1.102"));
        assert_eq!(status.best_metric.as_deref(), Some("0.7"));
    });
}

#[test]
fn delayed_validations_are_written_on_shutdown() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        // No interval ends before the third validation is found delayed.
        let interval = ["--validation-write-seconds", "3600"];
        let mut standby = Standby::start("shutdown", &interval).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let sender = standby.add_pod("one-0", &trial, 0, 0).await;
        // The first two validations are written at once, and the third is delayed.
        for (batches, loss) in [(1, "0.5"), (2, "1.2"), (3, "1.3")] {
            assert_eq!(sender.send(&validated(0, batches, loss, None)).await.0, 200);
        }
        assert_eq!(standby.trial_status("one-0").await.metrics["loss"], "1.2");
        assert_eq!(standby.metric("stoker_reports_total{answer=\"Held\"}"), 1);
        standby.operator.signal("-TERM");
        poll_until("the operator to end", async || match standby.operator.is_alive() {
            true => Err("it runs".to_owned()),
            false => Ok(()),
        })
        .await;
        let status = standby.trial_status("one-0").await;
        assert_eq!((status.batches, status.metrics["loss"].as_str()), (3, "1.3"));
    });
}

#[test]
fn overloaded_namespace_has_its_reports_delayed() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let standby = Standby::start("overload", &["--report-writes-per-second", "1"]).await;
        let owner = standby.add_experiment("one").await;
        let trial = standby.add_trial("one", &owner, 0).await;
        let sender = standby.add_pod("one-0", &trial, 0, 0).await;
        // Each validation is better than all before it, and therefore worth a write.
        let sent = (1..=30).map(|batches| {
            let report = validated(0, batches, &format!("0.{}", 90 - batches), None);
            let sender = &sender;
            async move { sender.send_for_wait(&report).await }
        });
        let answers = futures::future::join_all(sent).await;
        let of = |code: u16| answers.iter().filter(move |answer| answer.0 == code);
        assert!(of(200).count() >= 1 && of(429).count() >= 1, "{answers:?}");
        assert_eq!(of(200).count() + of(429).count(), 30, "{answers:?}");
        for (_, wait, text) in of(429) {
            assert!(wait.is_some_and(|seconds| seconds >= 3), "{wait:?}");
            assert!(text.contains("namespace overload exceeds 1 status writes"), "{text}");
        }
        let counted = |line: &str| standby.metric(line);
        assert_eq!(counted("stoker_reports_total{answer=\"Limited\"}") as usize, of(429).count());
        assert!(counted("stoker_reports_slowed_total") as usize >= of(429).count());
        assert!(standby.ns.logs().contains("are slowed down"));
        // A result is accepted while other reports are refused.
        record_result(&standby, &sender, &validated(0, UNITS, "0.5", Some(UNITS))).await;
    });
}
