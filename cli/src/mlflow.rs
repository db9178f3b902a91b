//! `stoker mlflow`: copies the trials of an experiment to an MLflow tracking server.
//!
//! ```text
//!  records of trials, metrics/*.jsonl --> [entries] --> [client] --> one run per trial
//! ```
//!
//! 1. [`entries`]: parameters, tags and metric values as MLflow stores them.
//! 2. [`client`]: the requests of MLflow's REST API.
//!
//! A server with a database stores identical values once. So a copy that was interrupted, or that
//! is older than the trial, is completed by sending all values again.

mod client;
mod entries;

use std::collections::BTreeMap;

use clap::Args;
use futures::{StreamExt as _, stream};
use serde_json::json;
use stoker_api::experiment::Experiment;
use stoker_api::trial::{Trial, TrialStatus};
use stoker_storage::metrics::Reader;

use self::client::{Client, RunRef};
use self::entries::{ENTRIES_MAX, PARAMS_MAX, TAG_EXPORTED};
use crate::cluster::connect::Cluster;
use crate::cluster::{experiment as experiments, metrics as cluster_metrics, storage, text};
use crate::commands::names::parse_name;
use crate::commands::{SourceArgs, block_on};
use crate::failure::Failure;
use crate::metrics::{self, MetricsFiles, TrialFiles};
use crate::print::{self, Output};
use crate::show::RecordedRun;

/// Maximum number of trials that are copied at the same time.
const TRIALS_MAX: usize = 8;

/// Arguments of `stoker mlflow`.
#[derive(Debug, Args)]
pub(crate) struct MlflowArgs {
    /// Experiment name or trial name, EXPERIMENT-INDEX; for local runs also a run ID
    #[arg(value_parser = parse_name)]
    name: String,
    /// URL of the tracking server, such as http://127.0.0.1:5000 [default: MLFLOW_TRACKING_URI]
    #[arg(long, value_name = "URL")]
    tracking_uri: Option<String>,
    /// Name of the experiment in MLflow, which is created if it does not exist [default: the name
    /// of the experiment]
    #[arg(long, value_name = "NAME")]
    experiment: Option<String>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    storage: storage::Options,
}

/// Trials to copy.
#[derive(Debug)]
struct Source {
    experiment: Experiment,
    /// Trials by index.
    trials: BTreeMap<u32, Trial>,
    files: MetricsFiles,
}

/// Change of a trial's run in MLflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Created,
    Updated,
    /// The run already contains the ended trial.
    None,
    /// The trial has not started. It has no run.
    NotStarted,
}

/// Copies the trials.
pub(crate) fn run(args: &MlflowArgs, output: Output) -> Result<u8, Failure> {
    block_on(async {
        // Check the server's address before the storage is read.
        let client = Client::new(args.tracking_uri.as_deref())?;
        let is_cluster = args.source.is_cluster();
        let source = match is_cluster {
            true => on_cluster(args).await?,
            false => recorded(args).await?,
        };
        copy(args, &source, &client, output).await.map_err(|failure| match is_cluster {
            true => cluster_metrics::with_remedy(failure, &source.experiment),
            false => failure,
        })?;
        Ok(0)
    })
}

async fn recorded(args: &MlflowArgs) -> Result<Source, Failure> {
    let (run, index) = RecordedRun::open_with_trial(args.source.root(), &args.name).await?;
    let selected = run.trials.iter().filter(|(number, _)| index.is_none_or(|of| of == **number));
    Ok(Source {
        trials: selected.map(|(index, trial)| (*index, run.object(trial))).collect(),
        files: run.metrics_files(index)?,
        experiment: run.experiment,
    })
}

async fn on_cluster(args: &MlflowArgs) -> Result<Source, Failure> {
    let cluster = Cluster::connect(&args.source.cluster).await?;
    let (experiment, trial) = experiments::experiment_or_trial(&cluster, &args.name).await?;
    let trials: Vec<Trial> = match trial {
        Some(trial) => vec![trial],
        None => {
            let trials = experiments::trials(&cluster, &experiment).await?;
            trials.into_iter().map(|(trial, _)| trial).collect()
        }
    };
    let files = cluster_metrics::files(args.name.clone(), &experiment, &trials, &args.storage)?;
    let trials = trials.into_iter().map(|trial| (trial.spec.index, trial)).collect();
    Ok(Source { experiment, trials, files })
}

async fn copy(
    args: &MlflowArgs,
    source: &Source,
    client: &Client,
    output: Output,
) -> Result<(), Failure> {
    let metadata = &source.experiment.metadata;
    let name = metadata.name.as_deref().unwrap_or_default();
    let uid = metadata.uid.as_deref().unwrap_or_default();
    let name = args.experiment.as_deref().unwrap_or(name);
    let experiment_id = client.experiment(name).await?;
    let copied = client.runs(&experiment_id, uid).await?;
    let reader = Reader::new(&source.files.storage);
    let copies = source.files.trials.iter().map(|files| {
        let target = Target {
            client,
            experiment_id: &experiment_id,
            run: copied.get(&files.index()),
            experiment: &source.experiment,
            location: source.files.location(files),
        };
        target.copy(source.trials.get(&files.index()), &reader, files)
    });
    let mut changes: Vec<Change> = Vec::new();
    let mut copies = stream::iter(copies).buffer_unordered(TRIALS_MAX);
    while let Some(copied) = copies.next().await {
        match copied {
            Ok(change) => changes.push(change),
            Err(failure) => {
                if output == Output::Text {
                    let done = changes.iter().filter(|change| **change != Change::NotStarted);
                    let (done, all) = (done.count(), source.files.trials.len());
                    print::err(format!(
                        "stoker: {done} of {all} trials are copied; run the command again to \
                         continue"
                    ));
                }
                return Err(failure);
            }
        }
    }
    report(&changes, name, &experiment_id, &client.page(&experiment_id), output);
    Ok(())
}

fn report(changes: &[Change], name: &str, experiment_id: &str, url: &str, output: Output) {
    let num = |change: Change| changes.iter().filter(|made| **made == change).count();
    let [created, updated, unchanged, not_started] =
        [Change::Created, Change::Updated, Change::None, Change::NotStarted].map(num);
    match output {
        Output::Json => print::out(json!({
            "url": url,
            "experimentId": experiment_id,
            "created": created,
            "updated": updated,
            "unchanged": unchanged,
            "notStarted": not_started,
        })),
        Output::Text => {
            print::out(format!(
                "Experiment {name} in MLflow: runs created {created}, updated {updated}, \
                 unchanged {unchanged}\n  {url}"
            ));
            if not_started > 0 {
                print::out(format!("Trials without a run, because they wait: {not_started}"));
            }
        }
    }
}

/// The run of a trial in MLflow, which may not exist yet.
struct Target<'a> {
    client: &'a Client,
    experiment_id: &'a str,
    run: Option<&'a RunRef>,
    experiment: &'a Experiment,
    /// URL of the trial's files.
    location: String,
}

impl Target<'_> {
    async fn copy(
        self,
        trial: Option<&Trial>,
        reader: &Reader<'_>,
        files: &TrialFiles,
    ) -> Result<Change, Failure> {
        let Some(trial) = trial else { return Ok(Change::NotStarted) };
        let status = trial.status.clone().unwrap_or_default();
        let exported = entries::exported(&status);
        if exported.is_some() && self.run.and_then(|run| run.exported.as_ref()) == exported.as_ref()
        {
            return Ok(Change::None);
        }
        let rows = metrics::read(reader, files, false).await?.1;
        let first = self.started(&status).or_else(|| entries::first_time(&rows));
        let Some(started) = first else {
            return Ok(Change::NotStarted);
        };
        let (run_id, change) = match self.run {
            Some(run) => (run.id.clone(), Change::Updated),
            None => (self.create(trial, started).await?, Change::Created),
        };
        let params = entries::params(&trial.spec.hyperparameters);
        for params in params.chunks(PARAMS_MAX) {
            self.client.log(&run_id, &json!({ "params": params })).await?;
        }
        let values = entries::values(&rows, started);
        for values in values.chunks(ENTRIES_MAX) {
            self.client.log(&run_id, &json!({ "metrics": values })).await?;
        }
        self.client.update(&run_id, &entries::state(&status)).await?;
        // Last, so that a copy without it is incomplete.
        if let Some(exported) = &exported {
            let tag = json!([{ "key": TAG_EXPORTED, "value": exported }]);
            self.client.log(&run_id, &json!({ "tags": tag })).await?;
        }
        Ok(change)
    }

    async fn create(&self, trial: &Trial, started: i64) -> Result<String, Failure> {
        let run = json!({
            "experiment_id": self.experiment_id,
            "run_name": format!("{}-{}", trial.spec.experiment, trial.spec.index),
            "start_time": started,
            "tags": entries::tags(self.experiment, trial, &self.location),
        });
        self.client.create_run(&run).await
    }

    /// Returns the start of the first recorded attempt, in milliseconds since 1970.
    fn started(&self, status: &TrialStatus) -> Option<i64> {
        let first = status.attempts.first()?;
        let created = || text::created(&self.experiment.metadata);
        Some(first.started_at.or_else(created)?.0 * 1000)
    }
}
