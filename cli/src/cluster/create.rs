//! `stoker experiment create`: a file, and perhaps a program's files, become an experiment.
//!
//! The cluster is asked first whether it would take the experiment; then the files are sent, and
//! only then is it made: no experiment waits for files that never come.

use std::path::PathBuf;

use kube::api::PostParams;
use serde_json::json;
use stoker_api::experiment::{CodeContext, DesiredState, Experiment};
use stoker_storage::layout;

use super::archive::{self, Archive};
use super::connect::{Cluster, Options};
use super::{logs, storage, text, wait};
use crate::failure::Failure;
use crate::file::{self, Loaded};
use crate::print::{self, Output};

/// What `stoker experiment create` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The experiment's file (YAML)
    file: PathBuf,
    /// A folder, or a single program, that is sent with the experiment and becomes its working
    /// folder in each pod: at most 95 MB when packed. Its .stokerignore says, as a .gitignore does,
    /// what is left out
    #[arg(value_name = "DIR")]
    files: Option<PathBuf>,
    /// Change a field of the file before it is read, such as searcher.random.maxTrials=4 or
    /// metadata.name=other; may be given more than once
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Create it paused: nothing runs until `stoker experiment activate`
    #[arg(long)]
    paused: bool,
    /// Print its logs until it has ended; the exit code is then that of the experiment
    #[arg(long, short, conflicts_with_all = ["paused", "dry_run"])]
    follow: bool,
    /// Try the program in the cluster: an experiment NAME-test of one batch, a validation, a checkpoint
    /// and its restore, whose logs are printed and whose exit code is given; it stays until deleted
    #[arg(long, conflicts_with = "paused")]
    test: bool,
    /// Check everything, with the cluster too, but send and create nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    storage: storage::Options,
}

/// Creates the experiment; returns the exit code.
pub(crate) async fn create(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load(&args.file, &args.set) {
        Ok(loaded) if args.test => crate::trying::cut_down(loaded)?,
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    loaded.notes.iter().for_each(print::err);
    let given = (args.options.namespace.as_deref(), loaded.metadata.namespace.as_deref());
    if let (Some(flag), Some(file)) = given
        && flag != file
    {
        return Err(Failure::Input(format!(
            "--namespace is {flag}, and metadata.namespace of {} is {file}; leave one of them out",
            args.file.display()
        )));
    }
    let mut experiment = object(&loaded, args.paused);
    let archive = args.files.as_deref().map(|it| archive::pack(it, archive::BYTES_MAX));
    let archive = archive.transpose()?;
    if let Some(archive) = &archive {
        set_context(&mut experiment, archive)?;
        // Said before anything is asked of the cluster.
        args.storage.address(&experiment.spec.checkpoint_storage)?;
    }
    let cluster = Cluster::connect(&args.options).await?;
    let cluster = cluster.within(given.1.unwrap_or(&cluster.namespace.clone()));
    post(&cluster, &experiment, true).await?;
    if args.dry_run {
        tell(&cluster, &experiment, archive.as_ref(), "would be created", output);
        return Ok(0);
    }
    if let Some(archive) = &archive {
        send(&cluster, &experiment, archive, &args.storage, output).await?;
    }
    let experiment = post(&cluster, &experiment, false).await?;
    if args.follow || args.test {
        print::err(format!("experiment {} is created in {}", loaded.name, cluster.namespace));
        let logs = logs::experiment(&cluster, &loaded.name, &args.storage, true, output);
        // Its end is worth waiting for even where its logs cannot be read.
        if let Err(error) = logs.await {
            print::err(format!("stoker: {error}"));
        }
        return wait::wait(&cluster, &loaded.name, None, output).await;
    }
    tell(&cluster, &experiment, archive.as_ref(), "is created", output);
    Ok(0)
}

fn object(loaded: &Loaded, paused: bool) -> Experiment {
    let mut experiment = Experiment::new(&loaded.name, loaded.valid.spec.clone());
    let metadata = &loaded.metadata;
    experiment.metadata.labels = Some(metadata.labels.clone()).filter(|it| !it.is_empty());
    experiment.metadata.annotations =
        Some(metadata.annotations.clone()).filter(|it| !it.is_empty());
    if paused {
        experiment.spec.state = DesiredState::Paused;
    }
    experiment
}

fn set_context(experiment: &mut Experiment, archive: &Archive) -> Result<(), Failure> {
    if let Some(context) = &experiment.spec.context {
        return Err(Failure::Input(format!(
            "spec.context.sha256 is {} in the file: leave it out where files are sent",
            context.sha256
        )));
    }
    experiment.spec.context = Some(CodeContext { sha256: archive.sha256.clone() });
    Ok(())
}

async fn post(
    cluster: &Cluster,
    experiment: &Experiment,
    dry_run: bool,
) -> Result<Experiment, Failure> {
    let name = experiment.metadata.name.as_deref().unwrap_or_default();
    let params = PostParams { dry_run, ..PostParams::default() };
    match cluster.api::<Experiment>().create(&params, experiment).await {
        Ok(created) => Ok(created),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            Err(Failure::Input(format!(
                "there is an experiment `{name}` in namespace `{}` already: give this one another \
                 name by --set metadata.name=NAME, or delete that one by `stoker experiment delete \
                 {name}`",
                cluster.namespace
            )))
        }
        Err(error) => Err(cluster.failure(&format!("experiment `{name}`"), error)),
    }
}

/// Sends the files, unless they are there.
async fn send(
    cluster: &Cluster,
    experiment: &Experiment,
    archive: &Archive,
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let spec = &experiment.spec.checkpoint_storage;
    let opened = options.open(spec)?;
    let path = layout::context_path(&cluster.namespace, &archive.sha256);
    let fail = |error| storage::failure(error, spec);
    if opened.size(&path).await.map_err(fail)? == Some(archive.bytes.len() as u64) {
        if output == Output::Text {
            print::err("the same files are in the storage already: nothing is sent");
        }
        return Ok(());
    }
    opened.put(&path, archive.bytes.clone().into()).await.map_err(fail)
}

fn tell(
    cluster: &Cluster,
    experiment: &Experiment,
    archive: Option<&Archive>,
    what: &str,
    output: Output,
) {
    if output == Output::Json {
        print::out(json!(experiment));
        return;
    }
    let name = experiment.metadata.name.as_deref().unwrap_or_default();
    if let Some(it) = archive {
        print::out(format!(
            "files: {}, {} ({} packed), SHA-256 {}",
            it.num_files,
            text::bytes(it.bytes_unpacked),
            text::bytes(it.bytes.len() as u64),
            it.sha256
        ));
    }
    print::out(format!("experiment {name} {what} in namespace {}", cluster.namespace));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Loaded {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.yaml");
        std::fs::write(&path, text).unwrap();
        file::load(&path, &[]).unwrap()
    }

    const FILE: &str = "\
apiVersion: stoker.dev/v1alpha1
kind: Experiment
metadata:
  name: mnist
  namespace: ml
  labels: {team: a}
  annotations: {note: b}
spec:
  entrypoint: {command: [./train]}
  searcher: {metric: loss, maxLength: {epochs: 1}, single: {}}
";

    #[test]
    fn the_object_has_what_the_file_says() {
        let loaded = load(FILE);
        assert_eq!(loaded.metadata.namespace.as_deref(), Some("ml"));
        let object = object(&loaded, true);
        assert_eq!(object.metadata.labels.unwrap()["team"], "a");
        assert_eq!(object.metadata.annotations.unwrap()["note"], "b");
        assert_eq!(object.spec.state, DesiredState::Paused);
    }

    #[test]
    fn files_are_named_by_their_content_and_only_once() {
        let mut object = object(&load(FILE), false);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("train"), "#!").unwrap();
        let archive = archive::pack(folder.path(), archive::BYTES_MAX).unwrap();
        set_context(&mut object, &archive).unwrap();
        assert_eq!(object.spec.context.as_ref().unwrap().sha256, archive.sha256);
        let error = set_context(&mut object, &archive).unwrap_err().to_string();
        assert!(error.contains("spec.context.sha256"), "{error}");
    }
}
