//! `stoker tensorboard`: starts the installed TensorBoard with the event files of an experiment or
//! a trial.
//!
//! TensorBoard itself reads buckets only with further packages. So files of a bucket are copied to
//! a temporary directory, and kept up to date.

mod copy;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use stoker_storage::{Storage, layout};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use self::copy::EventFiles;
use crate::cluster::connect::Cluster;
use crate::cluster::{experiment, storage};
use crate::commands::names::parse_name;
use crate::commands::{SourceArgs, block_on};
use crate::failure::Failure;
use crate::print::{self, Output};
use crate::run::signals::Signals;
use crate::show::RecordedRun;

/// Time between two checks whether TensorBoard accepts connections.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two copies of new events. TensorBoard itself reads files every few seconds.
const COPY_INTERVAL: Duration = Duration::from_secs(15);

/// Arguments of `stoker tensorboard`.
#[derive(Debug, Args)]
pub(crate) struct TensorboardArgs {
    /// Experiment name or trial name, EXPERIMENT-INDEX; for local runs also a run ID
    #[arg(value_parser = parse_name)]
    name: String,
    /// Port on the loopback interface; 0 selects a free one
    #[arg(long, value_name = "N", default_value_t = 6006)]
    port: u16,
    /// TensorBoard's program
    #[arg(long, value_name = "PATH", default_value = "tensorboard")]
    program: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    storage: storage::Options,
}

/// Event files of an experiment or a trial.
#[derive(Debug)]
struct Source {
    storage: Storage,
    /// Directory of the experiment or trial below the root.
    path: String,
    /// Indexes of the trials; `None` for all trials of the experiment.
    trial: Option<u32>,
}

impl Source {
    /// Returns the directory whose subdirectories TensorBoard shows as runs, below the root.
    fn folder(&self) -> String {
        match self.trial {
            Some(index) => layout::tensorboard_path(&format!("{}/trials/{index}", self.path)),
            None => format!("{}/trials", self.path),
        }
    }
}

/// Runs TensorBoard until it ends, or until a signal arrives.
pub(crate) fn run(args: &TensorboardArgs, output: Output) -> Result<u8, Failure> {
    block_on(async {
        let source = match args.source.is_cluster() {
            true => on_cluster(args).await?,
            false => recorded(args).await?,
        };
        serve(args, &source, output).await
    })
}

async fn recorded(args: &TensorboardArgs) -> Result<Source, Failure> {
    let (run, trial) = RecordedRun::open_with_trial(args.source.root(), &args.name).await?;
    Ok(Source { storage: run.storage()?, path: run.path(), trial })
}

async fn on_cluster(args: &TensorboardArgs) -> Result<Source, Failure> {
    let cluster = Cluster::connect(&args.source.cluster).await?;
    let (found, trial) = experiment::experiment_or_trial(&cluster, &args.name).await?;
    Ok(Source {
        storage: args.storage.open(&storage::of(&found))?,
        path: storage::experiment_path(&found),
        trial: trial.map(|trial| trial.spec.index),
    })
}

async fn serve(args: &TensorboardArgs, source: &Source, output: Output) -> Result<u8, Failure> {
    let mut signals = Signals::listen()?;
    // Dropped at the end, which deletes the copy.
    let (_copy, folder, mut files) = match source.storage.folder() {
        Some(root) => (None, root.join(source.folder()), None),
        None => {
            let copy = tempfile::Builder::new().prefix("stoker-tensorboard-").tempdir();
            let copy = copy.map_err(|error| {
                Failure::System(format!("cannot create a temporary directory: {error}"))
            })?;
            let folder = copy.path().to_owned();
            let mut files = EventFiles::new(source, &folder);
            files.update().await?;
            (Some(copy), folder, Some(files))
        }
    };
    let port = free_port(args.port).await?;
    let mut child = start(&args.program, &folder, port)?;
    let url = format!("http://127.0.0.1:{port}/");
    tokio::select! {
        ready = wait_until_ready(&mut child, port) => ready?,
        () = signals.next() => return end(child).await,
    }
    match output {
        Output::Json => print::out(json!({ "url": url, "folder": folder })),
        Output::Text => print::out(format!("TensorBoard at\n  {url}\nCtrl-C ends it")),
    }
    loop {
        tokio::select! {
            ended = child.wait() => return Ok(exit_code(ended)),
            () = signals.next() => return end(child).await,
            () = tokio::time::sleep(COPY_INTERVAL), if files.is_some() => {
                let Some(files) = &mut files else { continue };
                if let Err(error) = files.update().await {
                    print::err(format!("stoker: cannot copy new events: {error}; retrying"));
                }
            }
        }
    }
}

/// Returns `port`, or a free one for 0. Fails if the port is in use, because the other server would
/// be taken for TensorBoard.
async fn free_port(port: u16) -> Result<u16, Failure> {
    let bound = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
    let address = bound.and_then(|listener| listener.local_addr());
    let address = address.map_err(|error| {
        Failure::System(format!("cannot use port {port} on 127.0.0.1: {error}; set --port"))
    })?;
    Ok(address.port())
}

fn start(program: &Path, folder: &Path, port: u16) -> Result<Child, Failure> {
    Command::new(program)
        .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--logdir"])
        .arg(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| {
            Failure::System(format!(
                "cannot start {}: {error}; install it with `pip install tensorboard`, or set \
                 --program",
                program.display()
            ))
        })
}

/// Waits until TensorBoard accepts connections. It prints the reason if it cannot start.
async fn wait_until_ready(child: &mut Child, port: u16) -> Result<(), Failure> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    loop {
        let ended = child
            .try_wait()
            .map_err(|error| Failure::System(format!("cannot wait for TensorBoard: {error}")))?;
        if let Some(status) = ended {
            return Err(Failure::System(format!(
                "TensorBoard ended with {status}; its reason is above; if port {port} is in use, \
                 set --port"
            )));
        }
        if TcpStream::connect(address).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn end(mut child: Child) -> Result<u8, Failure> {
    let killed = child.kill().await;
    killed.map_err(|error| Failure::System(format!("cannot end TensorBoard: {error}")))?;
    Ok(0)
}

fn exit_code(ended: std::io::Result<std::process::ExitStatus>) -> u8 {
    u8::from(!ended.is_ok_and(|status| status.success()))
}
