//! `stoker experiment create` and `stoker job create`: a file, and perhaps a program's files, become an
//! experiment or a job.
//!
//! The cluster is asked first whether it would take the object; then the files are sent, and only then
//! is it made: nothing waits for files that never come.

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
use super::kind::Kind;
use super::{logs, storage, text, wait};
use crate::failure::Failure;
use crate::file::{self, Loaded, Metadata};
use crate::print::{self, Output};

/// How long one that is deleted may take to go, and how often to look.
const GONE_MAX: Duration = Duration::from_secs(120);
const GONE_POLL: Duration = Duration::from_millis(300);

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
    /// and its restore, whose logs are printed and whose exit code is given; it stays until it is deleted, or the next test
    /// takes its place
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
    let object = object(&loaded, args.paused);
    let order = Order {
        file: &args.file,
        files: args.files.as_deref(),
        namespace: loaded.metadata.namespace.as_deref(),
        dry_run: args.dry_run,
        options: &args.options,
        storage: &args.storage,
        is_quiet: args.follow || args.test,
        replaces: args.test.then_some(is_ended_test),
    };
    let cluster = make(object, &order, output).await?;
    if !args.dry_run && (args.follow || args.test) {
        let logs = logs::experiment(&cluster, &loaded.name, &args.storage, true, output);
        // Its end is worth waiting for even where its logs cannot be read.
        if let Err(error) = logs.await {
            print::err(format!("stoker: {error}"));
        }
        return wait::wait::<Experiment>(&cluster, &loaded.name, None, output).await;
    }
    Ok(0)
}

/// What `stoker job create` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// The job's file (YAML)
    file: PathBuf,
    /// A folder, or a single program, that is sent with the job and becomes its working folder in
    /// each pod: at most 95 MB when packed. Its .stokerignore says, as a .gitignore does, what is
    /// left out
    #[arg(value_name = "DIR")]
    files: Option<PathBuf>,
    /// Change a field of the file before it is read, such as resources.slots=4 or
    /// metadata.name=other; may be given more than once
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
    /// Create it paused: nothing runs until `stoker job activate`
    #[arg(long)]
    paused: bool,
    /// Print its logs until it has ended; the exit code is then that of the job
    #[arg(long, short, conflicts_with_all = ["paused", "dry_run"])]
    follow: bool,
    /// Check everything, with the cluster too, but send and create nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    storage: storage::Options,
}

/// Creates the job; returns the exit code.
pub(crate) async fn create_job(args: &JobArgs, output: Output) -> Result<u8, Failure> {
    let loaded = match file::load_cluster_job(&args.file, &args.set) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(crate::validate::print_error(&error, output)),
    };
    let mut job = InferenceJob::new(&loaded.name, loaded.valid.spec.clone());
    (job.metadata.labels, job.metadata.annotations) = own(&loaded.metadata);
    if args.paused {
        job.spec.state = DesiredState::Paused;
    }
    let order = Order {
        file: &args.file,
        files: args.files.as_deref(),
        namespace: loaded.metadata.namespace.as_deref(),
        dry_run: args.dry_run,
        options: &args.options,
        storage: &args.storage,
        is_quiet: args.follow,
        replaces: None,
    };
    let cluster = make(job, &order, output).await?;
    if args.follow {
        let logs = logs::job(&cluster, &loaded.name, None, true, &args.storage, output);
        if let Err(error) = logs.await {
            print::err(format!("stoker: {error}"));
        }
        return wait::wait::<InferenceJob>(&cluster, &loaded.name, None, output).await;
    }
    Ok(0)
}

/// How an object is made.
struct Order<'a, K> {
    /// The file that it is from.
    file: &'a Path,
    /// What is sent with it.
    files: Option<&'a Path>,
    /// The namespace that the file names.
    namespace: Option<&'a str>,
    dry_run: bool,
    options: &'a Options,
    storage: &'a storage::Options,
    /// Whether results follow, so that what is said goes to people alone.
    is_quiet: bool,
    /// Whether one of its name may make room for it.
    replaces: Option<fn(&K) -> bool>,
}

/// Whether this is a test of an experiment, which has ended.
fn is_ended_test(experiment: &Experiment) -> bool {
    let is_test = experiment.spec.env.iter().any(|it| it.name == ENV_TEST && it.value == "1");
    is_test && experiment.phase().is_terminal()
}

/// Deletes one of this name that may make room, and waits until it is gone.
async fn make_room<K: Kind>(
    cluster: &Cluster,
    name: &str,
    may_go: fn(&K) -> bool,
) -> Result<(), Failure> {
    let find = || async {
        let found = cluster.api::<K>().get_opt(name).await;
        found.map_err(|error| cluster.failure(&format!("{} `{name}`", K::WORD), error))
    };
    let Some(old) = find().await?.filter(may_go) else { return Ok(()) };
    let uid = old.meta().uid.clone();
    // Its trials and pods go first: those of the next have their names.
    let params = DeleteParams::foreground()
        .preconditions(Preconditions { uid: uid.clone(), resource_version: None });
    let what = format!("{} `{name}`", K::WORD);
    cluster.ask(&what, cluster.api::<K>().delete(name, &params)).await?;
    let end = Instant::now() + GONE_MAX;
    while find().await?.is_some_and(|it| it.meta().uid == uid) {
        if Instant::now() > end {
            return Err(Failure::System(format!(
                "{} `{name}`, the last test, is deleted but not gone after {} s: see who holds it by \
                 `kubectl get {0} {name} -n {2} -o jsonpath={{.metadata.finalizers}}`",
                K::WORD,
                GONE_MAX.as_secs(),
                cluster.namespace,
            )));
        }
        tokio::time::sleep(GONE_POLL).await;
    }
    Ok(())
}

/// Makes an experiment or a job, after all checks, with its files; returns the cluster, in its
/// namespace.
async fn make<K: Kind>(
    mut object: K,
    order: &Order<'_, K>,
    output: Output,
) -> Result<Cluster, Failure> {
    if let (Some(flag), Some(file)) = (order.options.namespace.as_deref(), order.namespace)
        && flag != file
    {
        return Err(Failure::Input(format!(
            "--namespace is {flag}, and metadata.namespace of {} is {file}; leave one of them out",
            order.file.display()
        )));
    }
    let archive = order.files.map(|it| archive::pack(it, archive::BYTES_MAX));
    let archive = archive.transpose()?;
    if let Some(archive) = &archive {
        set_context(&mut object, archive)?;
        // Said before anything is asked of the cluster.
        order.storage.address(&object.storage())?;
    }
    let cluster = Cluster::connect(order.options).await?;
    let cluster = cluster.within(order.namespace.unwrap_or(&cluster.namespace.clone()));
    if let Some(may_go) = order.replaces.filter(|_| !order.dry_run) {
        make_room(&cluster, &object.name(), may_go).await?;
    }
    post(&cluster, &object, true).await?;
    if order.dry_run {
        tell(&cluster, &object, archive.as_ref(), "would be created", output);
        return Ok(cluster);
    }
    if let Some(archive) = &archive {
        send(&cluster, &object, archive, order.storage, output).await?;
    }
    let object = post(&cluster, &object, false).await?;
    if order.is_quiet {
        let (word, name) = (K::WORD, object.name());
        print::err(format!("{word} {name} is created in {}", cluster.namespace));
    } else {
        tell(&cluster, &object, archive.as_ref(), "is created", output);
    }
    Ok(cluster)
}

type Map = BTreeMap<String, String>;

/// The labels and annotations that a file gives an object.
fn own(metadata: &Metadata) -> (Option<Map>, Option<Map>) {
    let some = |it: &Map| Some(it.clone()).filter(|it| !it.is_empty());
    (some(&metadata.labels), some(&metadata.annotations))
}

fn object(loaded: &Loaded, paused: bool) -> Experiment {
    let mut experiment = Experiment::new(&loaded.name, loaded.valid.spec.clone());
    (experiment.metadata.labels, experiment.metadata.annotations) = own(&loaded.metadata);
    if paused {
        experiment.spec.state = DesiredState::Paused;
    }
    experiment
}

fn set_context<K: Kind>(object: &mut K, archive: &Archive) -> Result<(), Failure> {
    if let Some(context) = object.context() {
        return Err(Failure::Input(format!(
            "spec.context.sha256 is {} in the file: leave it out where files are sent",
            context.sha256
        )));
    }
    *object.context() = Some(CodeContext { sha256: archive.sha256.clone() });
    Ok(())
}

async fn post<K: Kind>(cluster: &Cluster, object: &K, dry_run: bool) -> Result<K, Failure> {
    let (word, name) = (K::WORD, object.name());
    let params = PostParams { dry_run, ..PostParams::default() };
    match cluster.api::<K>().create(&params, object).await {
        Ok(created) => Ok(created),
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let article = if word == "experiment" { "an" } else { "a" };
            Err(Failure::Input(format!(
                "there is {article} {word} `{name}` in namespace `{}` already: give this one \
                 another name by --set metadata.name=NAME, or delete that one by `stoker {word} \
                 delete {name}`",
                cluster.namespace
            )))
        }
        Err(error) => Err(cluster.failure(&format!("{word} `{name}`"), error)),
    }
}

/// Sends the files, unless they are there.
async fn send<K: Kind>(
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
            print::err("the same files are in the storage already: nothing is sent");
        }
        return Ok(());
    }
    opened.put(&path, archive.bytes.clone().into()).await.map_err(fail)
}

fn tell<K: Kind>(
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
    if let Some(it) = archive {
        print::out(format!(
            "files: {}, {} ({} packed), SHA-256 {}",
            it.num_files,
            text::bytes(it.bytes_unpacked),
            text::bytes(it.bytes.len() as u64),
            it.sha256
        ));
    }
    let (word, name) = (K::WORD, object.name());
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
