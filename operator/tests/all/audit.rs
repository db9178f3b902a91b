//! The chart's rules: each is there for a request of the operator's, or says what for. That they
//! allow every request is checked where each test's [`Place`] ends.

use serde_json::Value;
use stoker_api::experiment::Phase;
use stoker_test_cluster::Request;

use crate::flow::grid;
use crate::jobs::{apply_job, is_of_job, job, wait_for_job};
use crate::kubelet::{Kubelet, Script};
use crate::setup::{ACCOUNT, Place, free_ports, runtime};
use crate::worker::Work;

/// Rules that no request of this operator needs here, with what they are for.
const UNSEEN: [(&str, &str); 1] = [(
    "stoker.dev experiments/finalizers",
    "asked for by an admission plugin, on behalf of owner references",
)];

/// The rules of a role, each with its group and its first resource in front.
fn rules(place: &Place, role: &[&str]) -> Vec<(String, Value)> {
    let role = place.plane.get(role).unwrap();
    let rules = role["rules"].as_array().unwrap().iter();
    let text = |it: &Value| it.as_str().unwrap().to_owned();
    let name = |it: &Value| format!("{} {}", text(&it["apiGroups"][0]), text(&it["resources"][0]));
    rules.map(|it| (name(it), it.clone())).collect()
}

fn allows(rule: &Value, request: &Request) -> bool {
    let has =
        |field: &str, value: &str| rule[field].as_array().unwrap().iter().any(|it| it == value);
    has("apiGroups", &request.group)
        && has("resources", &request.resource)
        && has("verbs", &request.verb)
}

#[test]
fn each_of_the_charts_rules_is_used_or_says_what_for() {
    if !stoker_test_cluster::wanted() {
        return;
    }
    runtime().block_on(async {
        let place = Place::new("audit").await;
        let mut operator = place.operator("a", free_ports());
        operator.wait_ready(&place);
        let _kubelet = Kubelet::start(&place.client, "audit", |pod| match is_of_job(pod) {
            true => Script::Work(Work { shards: 2, shard_ms: 10 }),
            false => Script::Train { unit_ms: 10 },
        });
        place.apply("grid", grid(2, 2, 2));
        apply_job(&place, "job", job(2));
        place.wait_for("grid", &[Phase::Completed], 60).await;
        wait_for_job(&place, "job", &[Phase::Completed], 60).await;
        let own = "audit:stoker-operator";
        let cluster = rules(&place, &["clusterrole", own]);
        let lease = rules(&place, &["role", "stoker-operator-lease", "-n", "audit"]);
        let watched = rules(&place, &["role", own, "-n", "audit"]);
        assert!(cluster.len() >= 2 && lease.len() >= 2 && watched.len() >= 6);
        let user = format!("system:serviceaccount:audit:{ACCOUNT}");
        let mut requests = place.plane.requests().unwrap();
        requests.retain(|it| it.user == user);
        let mut unused: Vec<String> = [cluster, lease, watched]
            .concat()
            .into_iter()
            .filter(|it| !requests.iter().any(|request| allows(&it.1, request)))
            .map(|it| it.0)
            .collect();
        unused.sort();
        assert_eq!(unused, UNSEEN.map(|it| it.0), "{requests:#?}");
    });
}
