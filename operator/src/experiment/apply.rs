//! Writes an experiment and its trials. A write fails if another client has changed the object.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DeserializeGuard, DynamicObject};
use kube::{Api, Resource as _, ResourceExt as _};
use serde_json::json;
use stoker_api::condition::Condition;
use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::{Experiment, ExperimentStatus};
use stoker_api::names::{LABEL_EXPERIMENT, LABEL_TRIAL};
use stoker_api::trial::{DesiredTrialState, Grant, Trial, TrialSpec};
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::explain::Decision;
use stoker_engine::experiment::{Ledger, Refusal, Request, Summary, Write, desired_states};
use stoker_engine::search::SearchConfig;
use stoker_engine::trial::{TrialRecord, is_reopening};

use super::is_owned;
use super::prior::prior_trials;
use crate::cache::{Cached as _, Key};
use crate::context::{Context, now};
use crate::error::{Error, request};
use crate::metrics::Kind;
use crate::objects::CachedTrial;
use crate::patch::{self, ObjectPart};
use crate::trial::apply::cache_trial;
use crate::user_resources::CachedExperiment;

/// Trials whose specs are written at the same time.
const WRITES_WIDTH: usize = 16;

/// The trials of an experiment, by index.
pub(crate) fn trials_of(context: &Context, key: &Key, uid: &str) -> Vec<Arc<CachedTrial>> {
    let mut trials = context.trials.group(key);
    // A trial that is being deleted counts as deleted.
    let stays = |trial: &CachedTrial| trial.trial.metadata.deletion_timestamp.is_none();
    trials.retain(|trial| is_owned(trial, uid) && stays(trial));
    trials.sort_by_key(|trial| trial.record.spec.index);
    trials
}

/// Writes an experiment and its trials in one pass.
pub(super) struct Writer<'a> {
    pub(super) context: &'a Context,
    /// The experiment as this pass read or wrote it.
    pub(super) experiment: Experiment,
    /// Trials as this pass read or wrote them, by index. A newer version may have another spec,
    /// which a write would undo.
    pub(super) trials: BTreeMap<u32, Arc<CachedTrial>>,
    pub(super) errors: Vec<Error>,
    /// Whether the API server has stored all of what this pass wrote. Definitions that are older
    /// than the operator drop fields.
    pub(super) is_all_stored: bool,
    /// Decisions that were recorded in this pass.
    pub(super) decisions: Vec<Decision>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        context: &'a Context,
        experiment: &Experiment,
        trials: &[Arc<CachedTrial>],
    ) -> Self {
        let trials = trials.iter().map(|trial| (trial.record.spec.index, trial.clone())).collect();
        Self {
            context,
            experiment: experiment.clone(),
            trials,
            errors: vec![],
            is_all_stored: true,
            decisions: vec![],
        }
    }

    /// Returns the records of the trials, by index.
    pub(super) fn records(&self) -> Vec<&TrialRecord> {
        self.trials.values().map(|trial| &trial.record).collect()
    }

    /// Returns the resources that the trials have spent, if the search has limits.
    pub(super) fn spending(&self, config: &SearchConfig) -> Summary {
        match config.limits.all().next() {
            None => Summary::default(),
            Some(_) => Summary::new(config, self.records()),
        }
    }

    /// Returns the trials of earlier experiments with which the search begins.
    pub(super) fn prior_trials(&self, valid: &ValidExperiment) -> Result<Vec<PriorTrial>, Refusal> {
        prior_trials(self.context, &self.experiment.namespace().unwrap_or_default(), valid)
    }

    /// Returns the record of a trial as this pass read or wrote it.
    pub(super) fn record(&self, index: u32) -> Option<&TrialRecord> {
        self.trials.get(&index).map(|trial| &trial.record)
    }

    /// Returns a trial as this pass read or wrote it.
    pub(super) fn trial(&self, index: u32) -> Option<&Trial> {
        self.trials.get(&index).map(|trial| &trial.trial)
    }

    /// Returns the experiment's status.
    pub(super) fn status(&self) -> ExperimentStatus {
        self.experiment.status.clone().unwrap_or_default()
    }

    /// Returns whether the cache lacks trials that the search knows.
    pub(super) fn lacks_trials(&self, ledger: &Ledger) -> bool {
        let trials = self.trials.iter().map(|(index, trial)| (*index, &trial.record)).collect();
        !ledger.deleted(&trials).is_empty()
    }

    /// Returns the trials that the search knows and that do not exist. The cache may lag behind,
    /// so the API server is asked.
    pub(super) async fn deleted(&mut self, ledger: &Ledger) -> Result<Vec<u32>, Error> {
        let trials = self.trials.iter().map(|(index, trial)| (*index, &trial.record)).collect();
        let mut deleted = vec![];
        for index in ledger.deleted(&trials) {
            let namespace = self.experiment.namespace().unwrap_or_default();
            let name = format!("{}-{index}", self.experiment.name_any());
            let api = self.context.trial_api(&namespace);
            let found =
                request(format!("read trial {namespace}/{name}"), api.get_opt(&name)).await?;
            let uid = self.experiment.metadata.uid.as_deref().unwrap_or_default();
            match found.map(CachedTrial::new).filter(|found| is_owned(found, uid)) {
                Some(found) if found.trial.metadata.deletion_timestamp.is_none() => {
                    self.context.trials.put(found);
                    let operation = format!("read trial {namespace}/{name} from the cache");
                    return Err(Error::Conflict { operation });
                }
                _ => deleted.push(index),
            }
        }
        Ok(deleted)
    }

    /// Writes what is wanted of trials, several at a time.
    pub(super) async fn want(&mut self, wanted: &[(u32, DesiredTrialState)]) {
        let context = self.context;
        let writes = wanted.iter().filter_map(|(index, state)| {
            let trial = self.trials.get(index)?.clone();
            let desired_since = Some(now());
            let spec =
                TrialSpec { desired_state: *state, desired_since, ..trial.record.spec.clone() };
            Some(async move { (trial.record.spec.index, write_spec(context, &trial, spec).await) })
        });
        let writes: Vec<_> = writes.collect();
        let mut written = futures::stream::iter(writes).buffer_unordered(WRITES_WIDTH);
        while let Some((index, result)) = written.next().await {
            match result {
                Ok(trial) => drop(self.trials.insert(index, trial)),
                Err(error) => self.errors.push(error),
            }
        }
    }

    /// Writes a turn: pins, then its home, then its effects on other trials. Pins and effects are
    /// written several at a time. The decisions count as recorded even if an effect fails: the next
    /// pass writes the effect, but does not decide again.
    pub(super) async fn turn(
        &mut self,
        writes: Vec<Write>,
        decisions: Vec<Decision>,
    ) -> Result<(), Error> {
        let (pins, writes): (Vec<_>, Vec<_>) =
            writes.into_iter().partition(|write| matches!(write, Write::Pin { .. }));
        let pins = pins.into_iter().filter_map(|write| match write {
            Write::Pin { trial, checkpoints } => Some((trial, checkpoints)),
            Write::Log(_) | Write::Grant { .. } => None,
        });
        self.pin(pins.collect()).await?;
        let mut writes = writes.into_iter();
        let Some(home) = writes.next() else { return Ok(()) };
        self.write_home(home).await?;
        self.decisions.extend(decisions);
        let effects = writes.filter_map(|write| match write {
            Write::Grant { trial, grant } => Some((trial, grant)),
            Write::Log(_) | Write::Pin { .. } => None,
        });
        self.effects(effects.collect()).await
    }

    /// Adds grants to different trials.
    pub(super) async fn effects(&mut self, grants: Vec<(u32, Grant)>) -> Result<(), Error> {
        let changed = grants.into_iter().filter_map(|(index, grant)| {
            let mut spec = self.trials.get(&index)?.record.spec.clone();
            if is_reopening(&grant) {
                // Whether the trial may run depends on the places of the search.
                spec.desired_state = DesiredTrialState::Pause;
                spec.desired_since = Some(now());
            }
            spec.grants.push(grant);
            Some((index, spec))
        });
        self.write_specs(changed.collect()).await
    }

    /// Pins checkpoints of different trials.
    async fn pin(&mut self, pins: Vec<(u32, Vec<String>)>) -> Result<(), Error> {
        let changed = pins.into_iter().filter_map(|(index, mut checkpoints)| {
            let mut spec = self.trials.get(&index)?.record.spec.clone();
            checkpoints.retain(|name| !spec.pins.contains(name));
            let is_new = !checkpoints.is_empty();
            spec.pins.extend(checkpoints);
            is_new.then_some((index, spec))
        });
        self.write_specs(changed.collect()).await
    }

    /// Removes pins that no copy needs any more. Failures are repeated in the next pass.
    pub(super) async fn unpin(&mut self, ledger: &Ledger) {
        let changed = ledger.unpinned(self.records()).into_iter().filter_map(|(index, pins)| {
            Some((index, TrialSpec { pins, ..self.trials.get(&index)?.record.spec.clone() }))
        });
        let changed: Vec<_> = changed.collect();
        if let Err(error) = self.write_specs(changed).await {
            self.errors.push(error);
        }
    }

    /// Writes the specs of different trials.
    async fn write_specs(&mut self, changed: Vec<(u32, TrialSpec)>) -> Result<(), Error> {
        let context = self.context;
        let writes = changed.into_iter().filter_map(|(index, spec)| {
            let trial = self.trials.get(&index)?.clone();
            Some(async move { (write_spec(context, &trial, spec.clone()).await, spec) })
        });
        let writes: Vec<_> = writes.collect();
        let mut written = futures::stream::iter(writes).buffer_unordered(WRITES_WIDTH);
        let mut result = Ok(());
        while let Some((outcome, spec)) = written.next().await {
            match outcome {
                Ok(trial) => {
                    self.is_all_stored &= trial.record.spec == spec;
                    self.trials.insert(spec.index, trial);
                }
                Err(error) => result = Err(error),
            }
        }
        result
    }

    /// Creates the missing trials in their order. A missing index below a created one counts as
    /// deleted, so the first error ends the list. Only `num_free` of them may run at once.
    pub(super) async fn create(
        &mut self,
        ledger: &mut Ledger,
        request: Request,
    ) -> Result<(), Error> {
        let missing: Vec<TrialSpec> = ledger.missing().cloned().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mut num_free = desired_states(ledger, &self.records(), request).num_free;
        for mut spec in missing {
            if num_free == 0 {
                spec.desired_state = DesiredTrialState::Pause;
            }
            num_free = num_free.saturating_sub(1);
            let index = spec.index;
            let created = create_trial(self.context, &self.experiment, spec.clone()).await?;
            self.is_all_stored &= created.record.spec == spec;
            self.trials.insert(index, created);
            ledger.created(index);
        }
        Ok(())
    }
}

async fn write_spec(
    context: &Context,
    trial: &CachedTrial,
    spec: TrialSpec,
) -> Result<Arc<CachedTrial>, Error> {
    let key = trial.key();
    let api = context.trial_api(&key.namespace);
    context.metrics.writes.get_or_create(&Kind::TRIAL_SPEC).inc();
    let operation = format!("write the spec of trial {key}");
    let change = (&trial.trial.spec, &spec);
    match patch::write(&api, operation, &trial.trial, ObjectPart::Spec, change).await {
        Ok(written) => Ok(cache_trial(context, written)),
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                context.trials.forget(&key);
            }
            Err(error)
        }
    }
}

/// Creates a trial. Adopts an existing one, unless it belongs to another experiment.
async fn create_trial(
    context: &Context,
    experiment: &Experiment,
    spec: TrialSpec,
) -> Result<Arc<CachedTrial>, Error> {
    let namespace = experiment.namespace().unwrap_or_default();
    let name = format!("{}-{}", experiment.name_any(), spec.index);
    let mut trial = Trial::new(&name, spec);
    trial.metadata.namespace = Some(namespace.clone());
    trial.metadata.owner_references = Some(vec![owner(experiment)]);
    let labels = [(LABEL_EXPERIMENT, experiment.name_any()), (LABEL_TRIAL, name.clone())];
    trial.metadata.labels = Some(labels.map(|(name, value)| (name.to_owned(), value)).into());
    let api = context.trial_api(&namespace);
    context.metrics.writes.get_or_create(&Kind::TRIAL_CREATE).inc();
    let operation = format!("create trial {namespace}/{name}");
    match request(operation, api.create(&PostParams::default(), &trial)).await {
        Ok(made) => Ok(cache_trial(context, made)),
        Err(Error::Exists { operation }) => {
            let found = request(format!("read trial {namespace}/{name}"), api.get(&name)).await?;
            let found = CachedTrial::new(found);
            let uid = experiment.metadata.uid.as_deref().unwrap_or_default();
            if !is_owned(&found, uid) {
                return Err(Error::Exists { operation });
            }
            Ok(cache_trial(context, found.trial.clone()))
        }
        Err(other) => Err(other),
    }
}

fn owner(experiment: &Experiment) -> OwnerReference {
    OwnerReference {
        api_version: Experiment::api_version(&()).into_owned(),
        kind: Experiment::kind(&()).into_owned(),
        name: experiment.name_any(),
        uid: experiment.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(false),
    }
}

/// Writes the changed fields of an experiment's status. Fails with a conflict if the experiment
/// changed since it was read.
pub(super) async fn write_status(
    context: &Context,
    experiment: &Experiment,
    status: ExperimentStatus,
) -> Result<Experiment, Error> {
    let key = Key::of(experiment);
    let api = context.experiment_api(&key.namespace);
    context.metrics.writes.get_or_create(&Kind::EXPERIMENT_STATUS).inc();
    let operation = format!("write the status of experiment {key}");
    let change = (&experiment.status, &Some(status));
    match patch::write(&api, operation, experiment, ObjectPart::Status, change).await {
        Ok(written) => {
            context.experiments.put(CachedExperiment::new(DeserializeGuard(Ok(written.clone()))));
            Ok(written)
        }
        Err(error) => {
            if matches!(error, Error::Gone { .. }) {
                context.experiments.forget(&key);
            }
            Err(error)
        }
    }
}

/// Sets one condition of an object whose other fields cannot be read.
pub(crate) async fn mark_unreadable<K: kube::Resource<DynamicType = ()>>(
    context: &Context,
    key: &Key,
    version: Option<String>,
    valid: &Condition,
) -> Result<(), Error> {
    let resource = ApiResource::erase::<K>(&());
    let kind = K::kind(&()).to_lowercase();
    let raw: Api<DynamicObject> =
        Api::namespaced_with(context.client.clone(), &key.namespace, &resource);
    // A merge patch replaces the whole list, so the other conditions are read first.
    let operation = format!("read {kind} {key}");
    let found: DynamicObject = request(operation, raw.get(&key.name)).await?;
    let mut conditions = found.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.retain(|condition| condition["type"] != valid.type_.as_str());
    conditions.push(json!(valid));
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "status": { "conditions": conditions },
    });
    let operation = format!("write the status of {kind} {key}");
    let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
    request(operation, raw.patch_status(&key.name, &parameters, &patch)).await.map(drop)
}
