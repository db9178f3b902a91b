//! `stoker experiment create` and `stoker job create`: create an experiment or a job from a file
//! and, optionally, the program's files.
//!
//! A dry run on the cluster validates the object first. Then the files are uploaded, and then the
//! object is created. So an object never refers to missing files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kube::api::{DeleteParams, PostParams, Preconditions};
use serde_json::json;
use stoker_api::experiment::{CodeContext, DesiredState, Experiment};
use stoker_api::inference::InferenceJob;
use stoker_api::names::ENV_TEST;
use stoker_storage::layout;

use super::archive::{self, Archive};
use super::connect::{Cluster, Options};
use super::logs::line::LogArgs;
use super::resource::ClusterResource;
use super::{logs, storage, text, wait};
use crate::failure::Failure;
use crate::file::{self, Loaded, Metadata};
use crate::print::{self, Output};

/// Maximum wait until a deleted test is gone.
const DELETION_TIMEOUT: Duration = Duration::from_secs(120);
/// Poll interval of this wait.
const DELETION_POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Arguments of `stoker experiment create`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment file (YAML)
    file: PathBuf,
    /// Directory or single program to upload, at most 95 MB when packed; becomes the working
    /// directory in each pod. A .stokerignore file excludes files, with the syntax of .gitignore
    #[arg(value_name = "DIR")]
    files: Option<PathBuf>,
    /// Override a field of the file, such as searcher.random.maxTrials=4 or metadata.name=other;
    /// repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Create the experiment paused; `stoker experiment activate` starts it
    #[arg(long)]
    paused: bool,
    /// Print logs until the experiment ends; the exit code reports its outcome
    #[arg(long, short, conflicts_with_all = ["paused", "dry_run"])]
    follow: bool,
    /// Smoke-test the program in the cluster: create an experiment NAME-test that trains one batch,
    /// validates, then saves and restores a checkpoint. Prints its logs; the exit code reports its
    /// outcome. NAME-test remains until it is deleted or replaced by the next test
    #[arg(long, conflicts_with = "paused")]
    test: bool,
    /// Validate locally and on the cluster, without uploading or creating anything
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    storage: storage::Options,
}

/// Creates the experiment and returns the exit code.
pub(crate) async fn create(args: &Args, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load_for_cluster(&args.file, &args.set) {
        Ok(loaded) if args.test => crate::smoke_test::to_smoke_test(loaded)?,
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    loaded.notes.iter().for_each(print::err);
    let experiment = new_experiment(&loaded, args.paused);
    let request = CreateRequest {
        file: &args.file,
        files: args.files.as_deref(),
        namespace: loaded.metadata.namespace.as_deref(),
        dry_run: args.dry_run,
        options: &args.options,
        storage: &args.storage,
        is_quiet: args.follow || args.test,
        replaces: args.test.then_some(is_ended_test),
    };
    let cluster = validate_and_create(experiment, &request, output).await?;
    if !args.dry_run && (args.follow || args.test) {
        let lines = (true, LogArgs::default());
        let logs = logs::experiment(&cluster, &loaded.name, &args.storage, lines, output);
        // Wait for the outcome even if the logs cannot be read.
        if let Err(error) = logs.await {
            print::err(format!("stoker: {error}"));
        }
        return wait::wait::<Experiment>(&cluster, &loaded.name, None, output).await;
    }
    Ok(0)
}

/// Arguments of `stoker job create`.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// Job file (YAML)
    file: PathBuf,
    /// Directory or single program to upload, at most 95 MB when packed; becomes the working
    /// directory in each pod. A .stokerignore file excludes files, with the syntax of .gitignore
    #[arg(value_name = "DIR")]
    files: Option<PathBuf>,
    /// Override a field of the file, such as resources.slots=4 or metadata.name=other; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Create the job paused; `stoker job activate` starts it
    #[arg(long)]
    paused: bool,
    /// Print logs until the job ends; the exit code reports its outcome
    #[arg(long, short, conflicts_with_all = ["paused", "dry_run"])]
    follow: bool,
    /// Validate locally and on the cluster, without uploading or creating anything
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    storage: storage::Options,
}

/// Creates the job and returns the exit code.
pub(crate) async fn create_job(args: &JobArgs, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load_cluster_job(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let mut job = InferenceJob::new(&loaded.name, loaded.valid.spec.clone());
    (job.metadata.labels, job.metadata.annotations) = labels_and_annotations(&loaded.metadata);
    if args.paused {
        job.spec.state = DesiredState::Paused;
    }
    let request = CreateRequest {
        file: &args.file,
        files: args.files.as_deref(),
        namespace: loaded.metadata.namespace.as_deref(),
        dry_run: args.dry_run,
        options: &args.options,
        storage: &args.storage,
        is_quiet: args.follow,
        replaces: None,
    };
    let cluster = validate_and_create(job, &request, output).await?;
    if args.follow {
        let lines = (true, LogArgs::default());
        let logs = logs::job(&cluster, &loaded.name, None, lines, &args.storage, output);
        if let Err(error) = logs.await {
            print::err(format!("stoker: {error}"));
        }
        return wait::wait::<InferenceJob>(&cluster, &loaded.name, None, output).await;
    }
    Ok(0)
}

/// Creation request.
struct CreateRequest<'a, K> {
    /// File of the object.
    file: &'a Path,
    /// Files to upload.
    files: Option<&'a Path>,
    /// Namespace in the file.
    namespace: Option<&'a str>,
    dry_run: bool,
    options: &'a Options,
    storage: &'a storage::Options,
    /// Whether results follow on standard output, so that the confirmation goes to standard error.
    is_quiet: bool,
    /// Whether an existing object of the same name may be replaced.
    replaces: Option<fn(&K) -> bool>,
}

/// Returns `true` if this is a test experiment that has ended.
fn is_ended_test(experiment: &Experiment) -> bool {
    let mut env = experiment.spec.env.iter();
    let is_test = env.any(|variable| variable.name == ENV_TEST && variable.value == "1");
    is_test && experiment.phase().is_terminal()
}

/// Deletes an object of this name if `may_replace` allows it, and waits until it is gone.
async fn remove_previous<K: ClusterResource>(
    cluster: &Cluster,
    name: &str,
    may_replace: fn(&K) -> bool,
) -> Result<(), Failure> {
    let find = || async {
        let object = cluster.api::<K>().get_opt(name).await;
        object.map_err(|error| cluster.failure(&format!("{} `{name}`", K::KIND_NAME), error))
    };
    let Some(old) = find().await?.filter(may_replace) else { return Ok(()) };
    let uid = old.meta().uid.clone();
    // Foreground deletion: the next object reuses the names of the trials and pods.
    let params = DeleteParams::foreground()
        .preconditions(Preconditions { uid: uid.clone(), resource_version: None });
    let what = format!("{} `{name}`", K::KIND_NAME);
    cluster.request(&what, cluster.api::<K>().delete(name, &params)).await?;
    let end = Instant::now() + DELETION_TIMEOUT;
    while find().await?.is_some_and(|object| object.meta().uid == uid) {
        if Instant::now() > end {
            return Err(Failure::System(format!(
                "{} `{name}` of the previous test still exists {} s after its deletion; check its \
                 finalizers: `kubectl get {0} {name} -n {2} -o jsonpath={{.metadata.finalizers}}`",
                K::KIND_NAME,
                DELETION_TIMEOUT.as_secs(),
                cluster.namespace,
            )));
        }
        tokio::time::sleep(DELETION_POLL_INTERVAL).await;
    }
    Ok(())
}

/// Validates and creates an experiment or a job, and uploads its files. Returns the cluster client
/// for the object's namespace.
async fn validate_and_create<K: ClusterResource>(
    mut object: K,
    request: &CreateRequest<'_, K>,
    output: Output,
) -> Result<Cluster, Failure> {
    if let (Some(flag), Some(file)) = (request.options.namespace.as_deref(), request.namespace)
        && flag != file
    {
        return Err(Failure::Input(format!(
            "--namespace is {flag}, but metadata.namespace of {} is {file}; remove one of them",
            request.file.display()
        )));
    }
    let archive = request.files.map(|path| archive::pack(path, archive::BYTES_MAX));
    let archive = archive.transpose()?;
    if let Some(archive) = &archive {
        set_context(&mut object, archive)?;
        // Report a missing storage address before the first request.
        request.storage.address(&object.storage())?;
    }
    let cluster = Cluster::connect(request.options).await?;
    let cluster = cluster.in_namespace(request.namespace.unwrap_or(&cluster.namespace.clone()));
    if let Some(may_replace) = request.replaces.filter(|_| !request.dry_run) {
        remove_previous(&cluster, &object.name(), may_replace).await?;
    }
    create_object(&cluster, &object, request.file, true).await?;
    if request.dry_run {
        print_object(&cluster, &object, archive.as_ref(), "would be created", output);
        return Ok(cluster);
    }
    if let Some(archive) = &archive {
        upload(&cluster, &object, archive, request.storage, output).await?;
    }
    let object = create_object(&cluster, &object, request.file, false).await?;
    if request.is_quiet {
        let (word, name) = (K::KIND_NAME, object.name());
        print::err(format!("{word} {name} created in namespace {}", cluster.namespace));
    } else {
        print_object(&cluster, &object, archive.as_ref(), "created", output);
    }
    Ok(cluster)
}

type Map = BTreeMap<String, String>;

/// Returns the labels and annotations in the file.
fn labels_and_annotations(metadata: &Metadata) -> (Option<Map>, Option<Map>) {
    let some = |map: &Map| Some(map.clone()).filter(|map| !map.is_empty());
    (some(&metadata.labels), some(&metadata.annotations))
}

fn new_experiment(loaded: &Loaded, paused: bool) -> Experiment {
    let mut experiment = Experiment::new(&loaded.name, loaded.valid.spec.clone());
    (experiment.metadata.labels, experiment.metadata.annotations) =
        labels_and_annotations(&loaded.metadata);
    if paused {
        experiment.spec.state = DesiredState::Paused;
    }
    experiment
}

fn set_context<K: ClusterResource>(object: &mut K, archive: &Archive) -> Result<(), Failure> {
    if let Some(context) = object.context() {
        return Err(Failure::Input(format!(
            "spec.context.sha256 is set in the file ({}), but files are uploaded; remove it",
            context.sha256
        )));
    }
    *object.context() = Some(CodeContext { sha256: archive.sha256.clone() });
    Ok(())
}

async fn create_object<K: ClusterResource>(
    cluster: &Cluster,
    object: &K,
    file: &Path,
    dry_run: bool,
) -> Result<K, Failure> {
    let (word, name) = (K::KIND_NAME, object.name());
    let params = PostParams { dry_run, ..PostParams::default() };
    match cluster.api::<K>().create(&params, object).await {
        Ok(created) => Ok(created),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            Err(Failure::Input(format!(
                "{word} `{name}` already exists in namespace `{}`; choose another name with --set \
                 {}=NAME, or delete it with `stoker {word} delete {name}`",
                cluster.namespace,
                file::name_field(file)
            )))
        }
        Err(error) => Err(cluster.failure(&format!("{word} `{name}`"), error)),
    }
}

/// Uploads the files, unless the storage already contains them.
async fn upload<K: ClusterResource>(
    cluster: &Cluster,
    object: &K,
    archive: &Archive,
    options: &storage::Options,
    output: Output,
) -> Result<(), Failure> {
    let spec = &object.storage();
    let opened = options.open(spec)?;
    let path = layout::context_path(&cluster.namespace, &archive.sha256);
    let fail = |error| storage::failure(error, spec);
    if opened.size(&path).await.map_err(fail)? == Some(archive.bytes.len() as u64) {
        if output == Output::Text {
            print::err("upload skipped: the storage already contains the same files");
        }
        return Ok(());
    }
    opened.put(&path, archive.bytes.clone().into()).await.map_err(fail)
}

fn print_object<K: ClusterResource>(
    cluster: &Cluster,
    object: &K,
    archive: Option<&Archive>,
    what: &str,
    output: Output,
) {
    if output == Output::Json {
        print::out(json!(object));
        return;
    }
    if let Some(archive) = archive {
        print::out(format!(
            "files: {}, {} ({} packed), SHA-256 {}",
            archive.num_files,
            text::bytes(archive.bytes_unpacked),
            text::bytes(archive.bytes.len() as u64),
            archive.sha256
        ));
    }
    let (word, name) = (K::KIND_NAME, object.name());
    print::out(format!("{word} {name} {what} in namespace {}", cluster.namespace));
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
    fn object_has_the_metadata_of_the_file() {
        let loaded = load(FILE);
        assert_eq!(loaded.metadata.namespace.as_deref(), Some("ml"));
        let experiment = new_experiment(&loaded, true);
        assert_eq!(experiment.metadata.labels.unwrap()["team"], "a");
        assert_eq!(experiment.metadata.annotations.unwrap()["note"], "b");
        assert_eq!(experiment.spec.state, DesiredState::Paused);
    }

    #[test]
    fn context_is_the_archive_hash_and_set_once() {
        let mut object = new_experiment(&load(FILE), false);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("train"), "#!").unwrap();
        let archive = archive::pack(folder.path(), archive::BYTES_MAX).unwrap();
        set_context(&mut object, &archive).unwrap();
        assert_eq!(object.spec.context.as_ref().unwrap().sha256, archive.sha256);
        let error = set_context(&mut object, &archive).unwrap_err().to_string();
        assert!(error.contains("spec.context.sha256"), "{error}");
    }
}
