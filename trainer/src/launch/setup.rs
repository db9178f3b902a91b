//! Prepares a pod before its program starts: copies the launcher and the program's files into it.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process;

use stoker_api::contract::{ContextRef, ExitCode, TrialConfig};
use stoker_api::names::pod_paths;
use stoker_storage::hash;

use super::signals::Signals;
use super::unpack::unpack;
use super::{open_storage, patient, preempted_before_start, report_error, runtime, trial_config};
use crate::Result;
use crate::error::Infrastructure;

/// Copies this program to [`pod_paths::LAUNCHER`]. If files were sent with the experiment, also
/// fetches and verifies them, and unpacks them to [`pod_paths::CONTEXT`]. `shared` replaces the
/// directory [`pod_paths::SHARED`].
pub fn setup(shared: Option<&Path>) -> process::ExitCode {
    match prepare_pod(shared.unwrap_or(Path::new(pod_paths::SHARED))) {
        Ok(()) => process::ExitCode::from(ExitCode::Completed as u8),
        Err(error) => report_error(&*error),
    }
}

fn prepare_pod(shared: &Path) -> Result<()> {
    let in_shared = |path: &str| {
        let relative = Path::new(path).strip_prefix(pod_paths::SHARED);
        shared.join(relative.unwrap_or(Path::new(path)))
    };
    copy_self(&in_shared(pod_paths::LAUNCHER))?;
    let Some(config) = trial_config()? else { return Ok(()) };
    let Some(context) = &config.context else { return Ok(()) };
    let archive = fetch_archive(&config, context)?;
    let folder = in_shared(pod_paths::CONTEXT);
    unpack(&archive, &folder).map_err(|error| {
        let text = format!("cannot unpack the program's files {}: {error}", context.path);
        match error.is_disk_failure() {
            true => Infrastructure(text).into(),
            false => text.into(),
        }
    })
}

/// Copies this program atomically, so that `to` is a complete program at any time.
fn copy_self(to: &Path) -> Result<()> {
    let copied = || -> std::io::Result<()> {
        let folder = to.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        // Copy the running program, even if its file has been replaced.
        std::io::copy(&mut std::fs::File::open("/proc/self/exe")?, &mut file)?;
        file.flush()?;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o755))?;
        file.persist(to).map_err(|error| error.error).map(drop)
    };
    Ok(copied().map_err(|error| {
        Infrastructure(format!("cannot copy the launcher to {}: {error}", to.display()))
    })?)
}

fn fetch_archive(config: &TrialConfig, context: &ContextRef) -> Result<bytes::Bytes> {
    let storage = open_storage(Some(config))?;
    let storage = storage.ok_or_else(|| {
        Infrastructure("cannot fetch the program's files: the trial has no storage".into())
    })?;
    let storage = patient(&storage, config).unwrap_or(storage);
    let archive = runtime()?.block_on(async {
        // The kernel drops signals for which the first process of a container does not listen.
        let mut signals = Signals::listen()?;
        tokio::select! {
            biased;
            () = signals.stop_requested() => Err(preempted_before_start()),
            archive = storage.get(&context.path) => Ok(archive?),
        }
    })?;
    let actual = hash::sha256_hex(&archive);
    if actual != context.sha256 {
        return Err(Infrastructure(format!(
            "{} has SHA-256 {actual}, but the experiment lists {}",
            context.path, context.sha256
        ))
        .into());
    }
    Ok(archive)
}
