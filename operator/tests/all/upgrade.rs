//! Operators of two versions write the same objects, as during a rolling upgrade.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Resource};
use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;
use stoker_test_cluster::ControlPlane;

use crate::flow::grid;
use crate::jobs::{apply_job, is_of_job, job, wait_for_job};
use crate::kubelet::{Kubelet, Script};
use crate::operator_process::Operator;
use crate::setup::{SCHEMA, TestNamespace, operator_port, own_plane, runtime};
use crate::standby::poll_until;
use crate::worker::Work;

/// A field that the operator under test does not know.
const FIELD: &str = "ofANewerVersion";

/// Lists in a status, with the field that identifies an entry; empty if the position does.
const LISTS: [(&str, &str); 5] = [
    ("attempts", "number"),
    ("checkpoints", "name"),
    ("conditions", "type"),
    ("facts", ""),
    ("workers", ""),
];

/// Adds the unknown field to each object of a schema.
fn extend_schema(schema: &mut Value) {
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.values_mut().for_each(extend_schema);
        properties.insert(FIELD.to_owned(), json!({ "type": "string" }));
    }
    if let Some(items) = schema.get_mut("items") {
        extend_schema(items);
    }
}

/// Creates a control plane with the CRDs of a newer version.
fn newer_plane() -> &'static ControlPlane {
    let options = stoker_test_cluster::Options { controllers: true, ..Default::default() };
    own_plane(options, |definition| {
        let schemas = definition.pointer_mut(SCHEMA).unwrap();
        extend_schema(&mut schemas["status"]);
        let spec = schemas["spec"]["properties"].as_object_mut().unwrap();
        spec.insert(FIELD.to_owned(), json!({ "type": "string" }));
    })
}

/// Calls `visit` with the name and value of each object that a newer version may extend.
fn visit_objects(object: &mut DynamicObject, visit: &mut dyn FnMut(String, &mut Value)) {
    visit("spec".to_owned(), &mut object.data["spec"]);
    let status = &mut object.data["status"];
    if !status.is_object() {
        return;
    }
    for (list, key) in LISTS {
        let entries = status.get_mut(list).and_then(Value::as_array_mut);
        for (position, entry) in entries.into_iter().flatten().enumerate() {
            let name = if key.is_empty() { json!(position) } else { entry[key].clone() };
            // A fact is an object with one field, which holds the fact.
            let is_fact = list == "facts";
            let inner =
                if is_fact { entry.as_object_mut().unwrap().values_mut().next() } else { None };
            match inner {
                Some(fact) => visit(format!("{list}/{name}"), fact),
                None => visit(format!("{list}/{name}"), entry),
            }
        }
    }
    for field in ["storage", "best"] {
        if status.get(field).is_some_and(Value::is_object) {
            visit(field.to_owned(), &mut status[field]);
        }
    }
    visit("status".to_owned(), status);
}

/// The newer version: extends what the older one writes, and checks that the extensions stay.
struct NewerVersion {
    api: Api<DynamicObject>,
    /// Names of extended parts, prefixed with the object's name.
    extended: BTreeSet<String>,
    lost: BTreeSet<String>,
}

impl NewerVersion {
    fn new<K: Resource<DynamicType = ()>>(ns: &TestNamespace) -> Self {
        let resource = ApiResource::erase::<K>(&());
        let api = Api::namespaced_with(ns.client.clone(), &ns.namespace, &resource);
        Self { api, extended: BTreeSet::new(), lost: BTreeSet::new() }
    }

    /// Extends all objects once.
    async fn pass(&mut self) {
        for mut object in self.api.list(&Default::default()).await.unwrap() {
            let name = object.metadata.name.clone().unwrap();
            let mut new = BTreeSet::new();
            let mut is_spec_new = false;
            visit_objects(&mut object, &mut |part, fields| {
                let part = format!("{name}: {part}");
                if fields.get(FIELD).is_some() {
                    return;
                }
                if self.extended.contains(&part) {
                    self.lost.insert(part.clone());
                }
                is_spec_new |= part.ends_with(": spec");
                fields[FIELD] = json!("x");
                new.insert(part);
            });
            if new.is_empty() {
                continue;
            }
            let parameters = Default::default();
            // An experiment's spec is immutable, and each pass writes one part.
            let is_spec_new = is_spec_new && object.types.as_ref().unwrap().kind == "Trial";
            let written = match is_spec_new {
                true => self.api.replace(&name, &parameters, &object).await,
                false => self.api.replace_status(&name, &parameters, &object).await,
            };
            match written {
                Ok(_) => new.retain(|part| part.ends_with(": spec") == is_spec_new),
                // The older version wrote first. The next pass retries.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => continue,
                Err(error) => panic!("{name}: {error}"),
            }
            self.extended.extend(new);
        }
    }
}

fn count(operator: &Operator, metric: &str) -> u64 {
    let metrics = operator.metrics();
    let line = metrics.lines().find_map(|line| line.strip_prefix(metric));
    line.map_or(0, |value| value.trim().parse().unwrap())
}

/// Checks that both replicas wrote, without errors, and that the standby's queues are empty.
fn check_metrics(leader: &Operator, server: &Operator, ns: &TestNamespace) {
    // Both replicas wrote trials, and neither mistook a conflict for a refusal.
    let writes = "stoker_api_writes_total{kind=\"trial_status\"} ";
    assert!(count(leader, writes) > 0 && count(server, writes) > 0);
    assert!(count(leader, "stoker_api_writes_total{kind=\"trial_spec\"} ") > 0);
    for kind in ["experiment", "trial", "job"] {
        let errors = format!("stoker_reconcile_errors_total{{kind=\"{kind}\"}} ");
        assert_eq!(count(leader, &errors), 0, "{kind}\n{}", ns.logs());
    }
    // A standby replica has empty queues.
    for kind in ["experiments", "trials", "jobs"] {
        let queued = format!("stoker_queued{{kind=\"{kind}\"}} ");
        assert_eq!(count(server, &queued), 0, "{kind}");
    }
}

#[test]
fn two_versions_keep_each_others_fields() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = tokio::task::block_in_place(newer_plane);
        let ns = TestNamespace::on(plane, "upgrade").await;
        // One replica leads, and the other serves the reports.
        let (port_a, port_b) = (operator_port(), operator_port());
        let door_url = format!("https://127.0.0.1:{port_b}");
        let more = ["--door-url", door_url.as_str()];
        let mut leader = ns.operator_with("a", port_a, &more);
        leader.wait_ready(&ns);
        poll_until("a to lead", async || match count(&leader, "stoker_leader ") {
            0 => Err("it does not lead".to_owned()),
            _ => Ok(()),
        })
        .await;
        let mut server = ns.operator_with("b", port_b, &more);
        server.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, "upgrade", |pod| match is_of_job(pod) {
            true => Script::Work(Work { shards: 4, shard_ms: 100 }),
            false => Script::Train { unit_ms: 100 },
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let mut versions = [
            NewerVersion::new::<Trial>(&ns),
            NewerVersion::new::<Experiment>(&ns),
            NewerVersion::new::<InferenceJob>(&ns),
        ];
        let is_done = is_over.clone();
        let newer = tokio::spawn(async move {
            while !is_done.load(Ordering::Relaxed) {
                for version in &mut versions {
                    version.pass().await;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            for version in &mut versions {
                version.pass().await;
            }
            versions
        });
        ns.apply("grid", grid(3, 4, 1));
        apply_job(&ns, "job", job(2));
        ns.wait_for("grid", &[Phase::Completed]).await;
        wait_for_job(&ns, "job", &[Phase::Completed]).await;
        is_over.store(true, Ordering::Relaxed);
        let [trials, experiments, jobs] = newer.await.unwrap();
        for version in [&trials, &experiments, &jobs] {
            assert!(version.lost.is_empty(), "lost: {:#?}", version.lost);
        }
        // The test extended every part while the operators were still writing.
        let has = |version: &NewerVersion, part: &str| {
            version.extended.iter().any(|name| name.contains(part))
        };
        for part in [": spec", ": status", "attempts/", "checkpoints/", "conditions/", "facts/"] {
            assert!(has(&trials, part), "{part}: {:#?}", trials.extended);
        }
        assert!(has(&experiments, "conditions/") && has(&experiments, ": storage"));
        assert!(has(&jobs, "conditions/") && has(&jobs, "workers/"));
        check_metrics(&leader, &server, &ns);
    });
}

/// The definition of jobs is missing when the operator starts.
#[test]
fn trials_run_without_the_job_definition() {
    if !stoker_test_cluster::clusters_enabled() {
        return;
    }
    runtime().block_on(async {
        let plane = own_plane(Default::default(), |_| {});
        plane.kubectl(&["delete", "crd", "inferencejobs.stoker.dev"]).unwrap();
        let ns = TestNamespace::on(plane, "no-jobs").await;
        let mut operator = ns.operator("a", operator_port());
        operator.wait_ready(&ns);
        let _kubelet = Kubelet::start(&ns.client, &ns.namespace, |_| Script::Train { unit_ms: 5 });
        ns.apply("grid", grid(1, 3, 1));
        ns.wait_for("grid", &[Phase::Completed]).await;
    });
}
