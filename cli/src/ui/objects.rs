//! Experiments, trials and jobs of a cluster, as watches report them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use kube::core::DeserializeGuard;
use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;
use stoker_engine::trial::TrialRecord;
use stoker_storage::Storage;
use stoker_ui::{Job, Run, Store, Unreadable};

use crate::cluster::{self, storage, text};

/// An object, or the reason why this version cannot parse it.
type Parsed<K> = DeserializeGuard<K>;

/// A change of an object.
pub(super) enum Change {
    /// All objects of a kind. Missing objects are gone.
    Experiments(Vec<Parsed<Experiment>>),
    Trials(Vec<Parsed<Trial>>),
    Jobs(Vec<Parsed<InferenceJob>>),
    /// An object, and whether it exists.
    Experiment(Box<Parsed<Experiment>>, bool),
    Trial(Box<Parsed<Trial>>, bool),
    Job(Box<Parsed<InferenceJob>>, bool),
    /// Kind that cannot be read now, with the reason.
    Failed(&'static str, String),
    /// Kind that is watched again.
    Recovered(&'static str),
    /// No client may watch any more.
    Ended,
}

/// A kind that the page shows.
pub(super) trait Watched: kube::Resource<DynamicType = ()> + Sized {
    /// Name of the kind in changes.
    const KIND: &'static str;

    /// All objects of the kind.
    fn listed(objects: Vec<Parsed<Self>>) -> Change;
    /// An object that has changed, and whether it exists.
    fn changed(object: Parsed<Self>, is_there: bool) -> Change;
}

impl Watched for Experiment {
    const KIND: &'static str = EXPERIMENT;

    fn listed(objects: Vec<Parsed<Self>>) -> Change {
        Change::Experiments(objects)
    }

    fn changed(object: Parsed<Self>, is_there: bool) -> Change {
        Change::Experiment(Box::new(object), is_there)
    }
}

impl Watched for Trial {
    const KIND: &'static str = TRIAL;

    fn listed(objects: Vec<Parsed<Self>>) -> Change {
        Change::Trials(objects)
    }

    fn changed(object: Parsed<Self>, is_there: bool) -> Change {
        Change::Trial(Box::new(object), is_there)
    }
}

impl Watched for InferenceJob {
    const KIND: &'static str = JOB;

    fn listed(objects: Vec<Parsed<Self>>) -> Change {
        Change::Jobs(objects)
    }

    fn changed(object: Parsed<Self>, is_there: bool) -> Change {
        Change::Job(Box::new(object), is_there)
    }
}

/// Party that opens storages.
#[derive(Clone, Debug)]
pub(super) enum Opening {
    /// This program, with credentials of the environment.
    Once(storage::Options),
    /// Each viewer, with credentials that the viewer may read.
    PerViewer,
}

/// Objects of the cluster.
pub(super) struct Objects {
    /// Experiments by UID.
    experiments: BTreeMap<String, Experiment>,
    /// Trials by namespace, UID of their experiment, and index. A trial can name an experiment of
    /// another namespace, to which it does not belong.
    trials: BTreeMap<(String, String), BTreeMap<u32, Arc<TrialRecord>>>,
    /// Jobs by UID.
    jobs: BTreeMap<String, InferenceJob>,
    /// Objects that cannot be parsed by kind and UID: namespace, name and reason.
    unreadable: BTreeMap<(&'static str, String), (String, String, String)>,
    /// Why kinds cannot be read now.
    failures: BTreeMap<&'static str, String>,
    /// Kinds that were listed.
    listed: BTreeSet<&'static str>,
    /// Storage by the UID of the experiment.
    storages: BTreeMap<String, Result<Arc<Storage>, String>>,
    /// Output directory with its URL, by the UID of the job.
    outputs: BTreeMap<String, (String, Result<Arc<Storage>, String>)>,
    opening: Opening,
}

const EXPERIMENT: &str = "experiment";
const TRIAL: &str = "trial";
const JOB: &str = "job";

/// Why a kind cannot be read before its first list.
const NOT_LISTED: &str = "the first list is not complete";

fn uid(object: &impl kube::Resource) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

/// Returns the UID of a trial's experiment.
fn owner(trial: &impl kube::Resource) -> Option<String> {
    let owners = trial.meta().owner_references.iter().flatten();
    owners.into_iter().find(|owner| owner.kind == "Experiment").map(|owner| owner.uid.clone())
}

/// Returns the index at the end of a trial's name.
fn index_of(trial: &impl kube::Resource) -> Option<u32> {
    trial.meta().name.as_deref()?.rsplit_once('-')?.1.parse().ok()
}

impl Objects {
    pub(super) fn new(opening: Opening) -> Self {
        Self {
            experiments: BTreeMap::new(),
            trials: BTreeMap::new(),
            jobs: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            failures: BTreeMap::new(),
            listed: BTreeSet::new(),
            storages: BTreeMap::new(),
            outputs: BTreeMap::new(),
            opening,
        }
    }

    /// Returns whether experiments and trials, or jobs, have been listed.
    pub(super) fn is_complete(&self) -> bool {
        self.listed.contains(JOB) || self.listed.is_superset(&BTreeSet::from([EXPERIMENT, TRIAL]))
    }

    /// Returns whether a kind cannot be read now.
    pub(super) fn has_failed(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Returns whether no client may watch any more.
    pub(super) fn is_end(change: &Change) -> bool {
        matches!(change, Change::Ended)
    }

    /// Returns an object that can be parsed, and takes note of others.
    fn parsed<K: kube::Resource>(
        &mut self,
        kind: &'static str,
        object: Parsed<K>,
        is_there: bool,
    ) -> Option<K> {
        let key = (kind, uid(&object));
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        self.unreadable.remove(&key);
        match object.0 {
            Ok(object) => Some(object),
            Err(invalid) if is_there => {
                let why = format!("this version of stoker cannot parse the {kind}: {invalid}");
                self.unreadable.insert(key, (namespace, name, why));
                None
            }
            Err(_) => None,
        }
    }

    fn start_list(&mut self, kind: &'static str) {
        self.listed.insert(kind);
        self.failures.remove(kind);
        self.unreadable.retain(|(of, _), _| *of != kind);
    }

    /// Takes a change in. Returns the UIDs of the experiments and jobs that it concerns.
    pub(super) fn take_in(&mut self, change: Change) -> Vec<String> {
        match change {
            Change::Experiments(all) => {
                self.start_list(EXPERIMENT);
                let before = std::mem::take(&mut self.experiments).into_keys();
                let now: Vec<String> = all
                    .into_iter()
                    .flat_map(|one| self.take_in(Change::Experiment(Box::new(one), true)))
                    .collect();
                before.chain(now).collect()
            }
            Change::Trials(all) => {
                self.start_list(TRIAL);
                let before = std::mem::take(&mut self.trials).into_keys().map(|(_, uid)| uid);
                let now = all.into_iter().filter_map(|trial| self.take_in_trial(trial, true));
                let now: Vec<String> = now.collect();
                before.chain(now).collect()
            }
            Change::Jobs(all) => {
                self.start_list(JOB);
                let before = std::mem::take(&mut self.jobs).into_keys();
                let now: Vec<String> = all
                    .into_iter()
                    .flat_map(|one| self.take_in(Change::Job(Box::new(one), true)))
                    .collect();
                before.chain(now).collect()
            }
            Change::Experiment(experiment, is_there) => {
                let uid = uid(&*experiment);
                match self.parsed(EXPERIMENT, *experiment, is_there).filter(|_| is_there) {
                    Some(experiment) => drop(self.experiments.insert(uid.clone(), experiment)),
                    None => drop(self.experiments.remove(&uid)),
                }
                vec![uid]
            }
            Change::Job(job, is_there) => {
                let uid = uid(&*job);
                match self.parsed(JOB, *job, is_there).filter(|_| is_there) {
                    Some(job) => drop(self.jobs.insert(uid.clone(), job)),
                    None => drop(self.jobs.remove(&uid)),
                }
                vec![uid]
            }
            Change::Trial(trial, is_there) => {
                self.take_in_trial(*trial, is_there).into_iter().collect()
            }
            Change::Failed(kind, why) => {
                self.failures.insert(kind, why);
                Vec::new()
            }
            Change::Recovered(kind) => {
                self.failures.remove(kind);
                Vec::new()
            }
            Change::Ended => Vec::new(),
        }
    }

    /// Takes a trial in. Returns the UID of its experiment.
    fn take_in_trial(&mut self, trial: Parsed<Trial>, is_there: bool) -> Option<String> {
        let (owner, index) = (owner(&trial), index_of(&trial));
        let namespace = trial.namespace().unwrap_or_default();
        let parsed = self.parsed(TRIAL, trial, is_there).filter(|_| is_there);
        let owner = owner?;
        let trials = self.trials.entry((namespace, owner.clone())).or_default();
        match (parsed, index) {
            (Some(trial), _) => {
                let status = trial.status.unwrap_or_default();
                let record = TrialRecord { spec: trial.spec, status };
                trials.insert(record.spec.index, Arc::new(record));
            }
            (None, Some(index)) => drop(trials.remove(&index)),
            (None, None) => {}
        }
        Some(owner)
    }

    /// Puts changed experiments and jobs into the store, and removes deleted ones.
    pub(super) fn publish(&mut self, changed: &BTreeSet<String>, store: &Store) {
        for uid in changed {
            if let Some(job) = self.jobs.get(uid).cloned() {
                let (url, output) = self.output(uid, &job);
                let created = text::created(&job.metadata);
                store.replace_job(Job::new(job, true, created, url, output));
            }
            let Some(experiment) = self.experiments.get(uid).cloned() else { continue };
            let storage = self.storage(uid, &experiment);
            let key = (experiment.namespace().unwrap_or_default(), uid.clone());
            let trials = self.trials.get(&key).cloned().unwrap_or_default();
            store.replace(Run::new(experiment, trials, true, storage));
        }
        store.retain(|run| self.experiments.contains_key(&run.uid));
        store.retain_jobs(|job| self.jobs.contains_key(&job.uid));
        let unreadable = self.unreadable.iter().map(|((kind, _), (namespace, name, why))| {
            ((namespace.clone(), format!("{kind} {name}")), why.clone())
        });
        store.set_unreadable(unreadable.collect::<Unreadable>());
        self.publish_failures(store);
        let experiments = &self.experiments;
        self.trials.retain(|(_, uid), all| experiments.contains_key(uid) || !all.is_empty());
        self.storages.retain(|uid, _| self.experiments.contains_key(uid));
        self.outputs.retain(|uid, _| self.jobs.contains_key(uid));
    }

    /// Puts the reasons why kinds cannot be read into the store. Before its first list, a kind has
    /// one too: otherwise pages would report that its objects were deleted.
    pub(super) fn publish_failures(&self, store: &Store) {
        let why = |kinds: &[&str]| {
            let failure = kinds.iter().find_map(|kind| self.failures.get(*kind).cloned());
            let is_listed = kinds.iter().all(|kind| self.listed.contains(*kind));
            failure.or_else(|| (!is_listed).then(|| NOT_LISTED.to_owned()))
        };
        store.set_watch_error(why(&[EXPERIMENT, TRIAL]));
        store.set_jobs_error(why(&[JOB]));
    }

    fn storage(&mut self, uid: &str, experiment: &Experiment) -> Result<Arc<Storage>, String> {
        let Opening::Once(options) = &self.opening else {
            return Err("each viewer opens the storage".to_owned());
        };
        let open = || {
            let opened = options.open(&storage::of(experiment));
            opened.map(Arc::new).map_err(|error| error.to_string())
        };
        self.storages.entry(uid.to_owned()).or_insert_with(open).clone()
    }

    /// Returns the output directory of a job: its URL, and the storage or why it cannot be read.
    fn output(&mut self, uid: &str, job: &InferenceJob) -> (String, Result<Arc<Storage>, String>) {
        let url = cluster::job::output_url(job);
        let Opening::Once(options) = &self.opening else {
            return (url, Err("each viewer opens the output".to_owned()));
        };
        if let Some((known, output)) = self.outputs.get(uid)
            && *known == url
        {
            return (url, output.clone());
        }
        let mut storage = cluster::job::storage_of(job);
        let opened = match &job.spec.output.url {
            _ if url.is_empty() => Err(cluster::job::NO_OUTPUT.to_owned()),
            // Options of this program may replace the address of the job's own storage only.
            Some(_) => {
                storage.url = Some(url.clone());
                storage.endpoint = job.spec.output.endpoint.clone();
                storage::Options::default().open(&storage).map_err(|error| error.to_string())
            }
            None => {
                let path = format!("{}/output", cluster::job::path(job));
                options.open_at(&storage, &path).map_err(|error| error.to_string())
            }
        };
        let opened = opened.map(Arc::new);
        self.outputs.insert(uid.to_owned(), (url.clone(), opened.clone()));
        (url, opened)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_ui::Visible;

    use super::*;

    fn parse<K>(value: Value) -> Parsed<K>
    where
        K: kube::Resource + serde::de::DeserializeOwned,
    {
        serde_json::from_value(value).unwrap()
    }

    fn experiment(name: &str, metric: &Value) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "ml", "uid": format!("uid-{name}")},
            "spec": {"entrypoint": {"command": ["true"]}, "searcher": {"metric": metric,
                "maxLength": {"batches": 4}, "random": {"maxTrials": 8}}},
        })
    }

    fn trial(index: u32, seed: &Value) -> Value {
        json!({
            "metadata": {"name": format!("good-{index}"), "namespace": "ml",
                "uid": format!("uid-trial-{index}"), "ownerReferences": [{"apiVersion": "v1",
                "kind": "Experiment", "name": "good", "uid": "uid-good"}]},
            "spec": {"experiment": "good", "index": index, "requestId": "r", "seed": seed,
                "hyperparameters": {}, "unit": "batches", "units": 4},
        })
    }

    fn summary(visible: &Visible) -> Vec<String> {
        let runs = visible.runs().into_iter();
        let runs =
            runs.map(|run| format!("{}/{}: {} trials", run.namespace, run.name, run.trials.len()));
        let unreadable = visible.unreadable().into_keys();
        let unreadable =
            unreadable.map(|(namespace, what)| format!("unreadable: {namespace}/{what}"));
        runs.chain(unreadable).collect()
    }

    #[test]
    fn unparsable_objects_do_not_hide_others() {
        let store = Arc::new(Store::default());
        let mut objects = Objects::new(Opening::PerViewer);
        let mut publish = |change: Change| {
            let changed = objects.take_in(change).into_iter().collect();
            objects.publish(&changed, &store);
            (summary(&Visible::all(store.clone())), objects.is_complete())
        };
        let loss = json!("loss");
        let listed = [experiment("good", &loss), experiment("broken", &json!(7))];
        let listed = listed.into_iter().map(parse).collect();
        let (summary, is_complete) = publish(Change::Experiments(listed));
        assert_eq!(summary, ["ml/good: 0 trials", "unreadable: ml/experiment broken"]);
        assert!(!is_complete);
        let trials = vec![parse(trial(0, &json!(1))), parse(trial(1, &json!("x")))];
        let (summary, is_complete) = publish(Change::Trials(trials));
        let broken = ["unreadable: ml/experiment broken", "unreadable: ml/trial good-1"];
        assert_eq!(summary, ["ml/good: 1 trials", broken[0], broken[1]]);
        assert!(is_complete);
        // A readable object becomes unreadable, and the other way round.
        let change = |value: Value| Change::Trial(Box::new(parse(value)), true);
        let (summary, _) = publish(change(trial(0, &json!("x"))));
        assert_eq!(summary[0], "ml/good: 0 trials");
        publish(change(trial(0, &json!(1))));
        let (summary, _) = publish(change(trial(1, &json!(1))));
        assert_eq!(summary, ["ml/good: 2 trials", broken[0]]);
        let fixed = Change::Experiment(Box::new(parse(experiment("broken", &loss))), true);
        assert_eq!(publish(fixed).0, ["ml/broken: 0 trials", "ml/good: 2 trials"]);
        let gone = Change::Experiment(Box::new(parse(experiment("broken", &json!(7)))), false);
        assert_eq!(publish(gone).0, ["ml/good: 2 trials"]);
    }

    #[test]
    fn trials_of_other_namespaces_are_ignored() {
        let store = Arc::new(Store::default());
        let mut objects = Objects::new(Opening::PerViewer);
        let mut shown = |change: Change| {
            let changed = objects.take_in(change).into_iter().collect();
            objects.publish(&changed, &store);
            summary(&Visible::all(store.clone()))
        };
        let mut foreign = trial(0, &json!(2));
        foreign["metadata"]["namespace"] = json!("other");
        shown(Change::Experiments(vec![parse(experiment("good", &json!("loss")))]));
        shown(Change::Trial(Box::new(parse(foreign.clone())), true));
        let own = Change::Trial(Box::new(parse(trial(0, &json!(1)))), true);
        assert_eq!(shown(own), ["ml/good: 1 trials"]);
        let deleted = Change::Trial(Box::new(parse(foreign.clone())), false);
        assert_eq!(shown(deleted), ["ml/good: 1 trials"]);
        let listed = Change::Trials(vec![parse(foreign)]);
        assert_eq!(shown(listed), ["ml/good: 0 trials"]);
    }

    #[test]
    fn missing_lists_and_failed_watches_are_reported() {
        let store = Arc::new(Store::default());
        let visible = Visible::all(store.clone());
        let mut objects = Objects::new(Opening::PerViewer);
        let mut check = |change: Change, expected: [Option<&str>; 2], has_failed: bool| {
            objects.take_in(change);
            objects.publish_failures(&store);
            let (watch, jobs) = (visible.watch_error(), visible.jobs_error());
            assert_eq!([watch.as_deref(), jobs.as_deref()], expected);
            assert_eq!(objects.has_failed(), has_failed);
        };
        let failed = |kind: &'static str, why: &str| Change::Failed(kind, why.to_owned());
        check(Change::Trials(Vec::new()), [Some(NOT_LISTED), Some(NOT_LISTED)], false);
        check(Change::Experiments(Vec::new()), [None, Some(NOT_LISTED)], false);
        check(Change::Jobs(Vec::new()), [None, None], false);
        check(failed(TRIAL, "500"), [Some("500"), None], true);
        check(failed(JOB, "403"), [Some("500"), Some("403")], true);
        check(failed(EXPERIMENT, "401"), [Some("401"), Some("403")], true);
        // A list succeeds, or a watch after a list that came earlier.
        check(Change::Experiments(Vec::new()), [Some("500"), Some("403")], true);
        check(Change::Recovered(TRIAL), [None, Some("403")], true);
        check(Change::Jobs(Vec::new()), [None, None], false);
    }
}
