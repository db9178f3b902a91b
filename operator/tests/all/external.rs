//! External searchers: a small HTTP server in the test is the Service of the experiment.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::{Value, json};
use stoker_api::condition;
use stoker_api::experiment::{Experiment, Phase};
use tokio::net::TcpListener;

use crate::kubelet::{Kubelet, Script};
use crate::setup::{TestNamespace, operator_port, runtime};

/// Behavior of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Mode {
    #[default]
    Answer,
    Redirect,
    TooLarge,
    /// Remembers the answer, but never sends it.
    Hang,
}

/// The searcher and its memory.
#[derive(Debug, Default)]
struct Service {
    mode: Mode,
    questions: Vec<Value>,
    answers: BTreeMap<u64, Value>,
    /// Whether the response to call 1 is 503.
    is_out: bool,
}

impl Service {
    /// Creates three trials of 2 batches, continues those with an even index to 6, and stops the
    /// others. Answers a repeated call as before.
    fn answer(&mut self, question: &Value) -> Value {
        let call = question["call"].as_u64().unwrap();
        let mut actions = vec![];
        for event in question["events"].as_array().unwrap() {
            if event.get("began").is_some() {
                actions.extend((0..3).map(|number| {
                    let x = f64::from(number) / 4.0;
                    json!({ "create": {
                        "hyperparameters": { "x": x }, "units": 2, "tag": format!("t{number}"),
                    } })
                }));
            }
            if event["result"]["units"] == 2 {
                let trial = event["result"]["trial"].as_u64().unwrap();
                assert_eq!(event["result"]["tag"], format!("t{trial}"));
                actions.push(match trial % 2 {
                    0 => json!({ "continue": { "trial": trial, "units": 6 } }),
                    _ => json!({ "stop": { "trial": trial } }),
                });
            }
        }
        let answer = json!({ "call": call, "actions": actions });
        self.answers.entry(call).or_insert(answer).clone()
    }
}

type Shared = Arc<Mutex<Service>>;

async fn respond(service: Shared, body: Bytes) -> (StatusCode, HeaderMap, String) {
    let question: Value = serde_json::from_slice(&body).unwrap();
    let (mode, answer, is_out) = {
        let mut service = service.lock().unwrap();
        let is_out = question["call"] == 1 && service.is_out;
        let answer = match service.mode {
            Mode::Answer | Mode::Hang if !is_out => service.answer(&question),
            _ => Value::Null,
        };
        service.questions.push(question);
        (service.mode, answer, is_out)
    };
    let mut headers = HeaderMap::new();
    match mode {
        _ if is_out => (StatusCode::SERVICE_UNAVAILABLE, headers, "out of memory".to_owned()),
        Mode::Answer => (StatusCode::OK, headers, answer.to_string()),
        Mode::Redirect => {
            headers.insert(header::LOCATION, "/other".parse().unwrap());
            (StatusCode::TEMPORARY_REDIRECT, headers, String::new())
        }
        Mode::TooLarge => (StatusCode::OK, headers, " ".repeat((1 << 20) + 1)),
        Mode::Hang => std::future::pending().await,
    }
}

async fn serve(listener: TcpListener, service: Shared) {
    let router = Router::new().fallback(move |body: Bytes| respond(service.clone(), body));
    axum::serve(listener, router).await.unwrap();
}

fn external(external: Value) -> Value {
    json!({
        "entrypoint": { "command": ["stoker-trainer", "mnist"] },
        "hyperparameters": { "x": { "double": { "min": 0.0, "max": 1.0 } } },
        "searcher": {
            "metric": "loss", "maxLength": { "batches": 6 }, "releaseSeconds": 0,
            "external": external,
        },
        "reproducibility": { "experimentSeed": 5 },
    })
}

/// Waits until the experiment is refused with these words.
async fn wait_for_refusal(ns: &TestNamespace, reason: &str, words: &str) -> Experiment {
    let end = Instant::now() + stoker_test_cluster::PATIENCE;
    loop {
        let experiment = ns.experiment("external").await;
        let conditions = experiment.status.clone().unwrap_or_default().conditions;
        let refused = condition::find(&conditions, "Refused");
        if refused.is_some_and(|of| of.reason == reason && of.message.contains(words)) {
            return experiment;
        }
        assert!(Instant::now() < end, "{refused:?}\n{}", ns.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Creates the Service of the searcher.
fn apply_service(ns: &TestNamespace, spec: Value) {
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "searcher", "namespace": ns.namespace }, "spec": spec,
    });
    ns.plane.apply(&service.to_string()).unwrap();
}

/// Such a Service is a name for any host.
#[test]
fn external_names_are_not_asked() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("external-name").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        ns.apply("external", external(json!({ "url": "http://searcher/ask", "maxTrials": 3 })));
        let missing = "service external-name/searcher not found";
        wait_for_refusal(&ns, "SearcherUnavailable", missing).await;
        apply_service(&ns, json!({ "type": "ExternalName", "externalName": "localhost" }));
        wait_for_refusal(&ns, "SearcherUnavailable", "has the type ExternalName").await;
    });
}

#[test]
fn service_of_the_namespace_decides_the_search() {
    if !stoker_test_cluster::clusters_enabled()
        || !stoker_test_cluster::has_root("names of Services in the operator's resolver")
    {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("external").await;
        let hosts = "127.0.0.1 localhost searcher.external.svc\n";
        let ports = operator_port();
        let mut operator = ns.operator_with_hosts("a", ports, hosts);
        operator.wait_ready(&ns);
        let kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        let port = operator_port();
        let url = format!("http://searcher:{port}/ask");
        apply_service(&ns, json!({ "clusterIP": "None", "selector": { "a": "b" } }));
        ns.apply("external", external(json!({ "url": url, "maxTrials": 3 })));
        let place = format!("http://searcher.external.svc:{port}/ask");
        let refused = wait_for_refusal(&ns, "SearcherUnavailable", &place).await;
        assert_eq!(refused.status.unwrap().phase, Phase::Pending);

        let service = Shared::default();
        service.lock().unwrap().mode = Mode::Redirect;
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let server = tokio::spawn(serve(listener, service.clone()));
        wait_for_refusal(&ns, "AnswerRefused", "redirects are not followed").await;
        service.lock().unwrap().mode = Mode::TooLarge;
        wait_for_refusal(&ns, "AnswerRefused", "more than 1048576 bytes").await;

        // The operator dies after the service has answered, and before the answer arrives.
        service.lock().unwrap().mode = Mode::Hang;
        let end = Instant::now() + stoker_test_cluster::PATIENCE;
        while service.lock().unwrap().answers.is_empty() {
            assert!(Instant::now() < end, "{}", ns.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        operator.kill();
        {
            let mut service = service.lock().unwrap();
            (service.mode, service.is_out) = (Mode::Answer, true);
            service.questions.clear();
        }
        let mut operator = ns.operator_with_hosts("b", ports, hosts);
        operator.wait_ready(&ns);
        wait_for_refusal(&ns, "SearcherUnavailable", "`out of memory`").await;
        service.lock().unwrap().is_out = false;
        let ended = ns.wait_for("external", &[Phase::Completed, Phase::Failed]).await;
        let status = ended.status.unwrap();
        assert_eq!((status.phase, status.trials_created), (Phase::Completed, 3), "{}", ns.logs());
        let refused = condition::find(&status.conditions, "Refused").unwrap();
        assert_eq!(refused.status, condition::ConditionStatus::False, "{refused:?}");
        server.abort();

        check_trials(&ns).await;
        // No unit was trained twice: the trials trained on during the outage.
        assert_eq!(kubelet.units(), 6 + 2 + 6);
        check_calls(&service.lock().unwrap().questions);
    });
}

/// Checks that the answers had their effects once.
async fn check_trials(ns: &TestNamespace) {
    let of = |trial: stoker_api::trial::Trial| {
        let units = trial.spec.grants.iter().map(|grant| grant.units).max();
        (trial.spec.tag, trial.spec.hyperparameters["x"].as_f64(), units)
    };
    let trials: Vec<_> = ns.trials_of("external").await.into_iter().map(of).collect();
    let expected = |number: u32, units: u64| {
        (Some(format!("t{number}")), Some(f64::from(number) / 4.0), Some(units))
    };
    assert_eq!(trials, [expected(0, 6), expected(1, 2), expected(2, 6)]);
}

/// Checks that each event was asked in one call: the beginning and five results.
fn check_calls(questions: &[Value]) {
    let mut calls = BTreeMap::new();
    for question in questions {
        for event in question["events"].as_array().unwrap() {
            let call = question["call"].as_u64().unwrap();
            let before = calls.entry(event["order"].as_u64()).or_insert(call);
            assert_eq!(*before, call, "{question}");
        }
    }
    assert_eq!(calls.len(), 6, "{calls:?}");
}

#[test]
fn cluster_refuses_programs_and_other_hosts() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let ns = TestNamespace::new("external-refused").await;
        let apply = |external: Value| {
            let object = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
                "metadata": { "name": "refused", "namespace": ns.namespace },
                "spec": self::external(external),
            });
            tokio::task::block_in_place(|| ns.plane.apply(&object.to_string()))
        };
        let host = "url must be http://SERVICE[:PORT][/PATH]";
        for (external, words) in [
            (json!({ "command": ["python3", "a.py"] }), "command runs only under `stoker run`"),
            (json!({ "url": "http://10.0.0.1/" }), host),
            (json!({ "url": "http://localhost:80/" }), host),
            (json!({ "url": "http://searcher.other.svc/" }), host),
            (json!({ "url": "https://searcher/" }), host),
        ] {
            let mut external = external;
            external["maxTrials"] = json!(3);
            let error = apply(external).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        apply(json!({ "url": "http://searcher/", "maxTrials": 3 })).unwrap();
        let patch = json!({ "spec": { "searcher": { "external": { "url": "http://other/" } } } });
        let error = ns.patch("refused", &patch).unwrap_err();
        assert!(error.contains("url, command: cannot change"), "{error}");
    });
}
