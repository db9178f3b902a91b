//! Choice of the checkpoint to resume from.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;

use stoker_api::contract::CheckpointRef;
use stoker_storage::layout;
use tokio::runtime::Handle;

use super::{CheckpointError, CheckpointStore};

/// Number of checkpoints whose manifests show whether the storage is available.
const MANIFESTS_MAX: usize = 2;

/// The first checkpoint that can be loaded.
#[derive(Debug)]
pub(crate) struct Choice<T> {
    pub(crate) chosen: Option<(CheckpointRef, T)>,
    /// Checkpoints tried before it, with the reason why each was refused.
    pub(crate) refused: BTreeMap<String, String>,
    /// Error of the first of them that another version of Stoker wrote.
    pub(crate) unsupported: Option<CheckpointError>,
}

/// Loads the first of `refs` that is complete, intact and readable. A checkpoint with an unreadable
/// object is refused only if the storage is available otherwise: manifests show this for one
/// checkpoint. If two are unreadable, only small requests may succeed, so another checkpoint must
/// be loaded completely, and the unreadable ones are then tried once more. `load` gets a store with
/// few retries when it repeats.
///
/// # Errors
///
/// Fails if the storage is unavailable. Also fails if no checkpoint can be loaded and one is
/// unreadable: it may be intact, so training must not start from scratch.
pub(crate) fn load_first<T>(
    rt: &Handle,
    store: &CheckpointStore,
    refs: &[CheckpointRef],
    load: impl Fn(&CheckpointStore, &CheckpointRef) -> Result<T, CheckpointError>,
) -> Result<Choice<T>, CheckpointError> {
    let storage = store.storage.clone().with_few_retries();
    let impatient = CheckpointStore { storage, ..store.clone() };
    let (mut refused, mut unreadable) = (BTreeMap::new(), vec![]);
    let (mut first_error, mut unsupported) = (None, None);
    for (idx, wanted) in refs.iter().enumerate() {
        let loaded = match load(if unreadable.len() < 2 { store } else { &impatient }, wanted) {
            Err(error @ CheckpointError::Storage { .. }) if unreadable.is_empty() => {
                if !is_available(rt, store, &refs[idx..])? {
                    return Err(error);
                }
                // An outage may have ended just now.
                load(&impatient, wanted)
            }
            loaded => loaded,
        };
        match loaded {
            Ok(loaded) => {
                if unreadable.len() > 1
                    && let Some((at, loaded)) = load_any(&impatient, refs, &unreadable, &load)
                {
                    let is_before = |name: &String| refs[..at].iter().any(|r| r.name == *name);
                    refused.retain(|name, _| is_before(name));
                    let chosen = Some((refs[at].clone(), loaded));
                    return Ok(Choice { chosen, refused, unsupported });
                }
                let chosen = Some((wanted.clone(), loaded));
                return Ok(Choice { chosen, refused, unsupported });
            }
            Err(CheckpointError::Corrupt { name, reason }) => {
                refused.insert(name, reason);
            }
            Err(CheckpointError::Format { name, reason }) => {
                refused.insert(name.clone(), reason.clone());
                unsupported.get_or_insert(CheckpointError::Format { name, reason });
            }
            Err(CheckpointError::Storage { name, source }) => {
                refused.insert(name.clone(), source.to_string());
                unreadable.push(idx);
                first_error.get_or_insert(CheckpointError::Storage { name, source });
            }
            Err(error) => return Err(error),
        }
    }
    first_error.map_or(Ok(Choice { chosen: None, refused, unsupported }), Err)
}

/// Loads the first of the checkpoints at these positions that can be loaded now.
fn load_any<T>(
    store: &CheckpointStore,
    refs: &[CheckpointRef],
    positions: &[usize],
    load: impl Fn(&CheckpointStore, &CheckpointRef) -> Result<T, CheckpointError>,
) -> Option<(usize, T)> {
    positions.iter().find_map(|at| Some((*at, load(store, &refs[*at]).ok()?)))
}

/// Returns whether the manifest of one of the first checkpoints can be read, with few retries.
fn is_available(
    rt: &Handle,
    store: &CheckpointStore,
    refs: &[CheckpointRef],
) -> Result<bool, CheckpointError> {
    let Some(first) = refs.first() else { return Ok(false) };
    let storage = store.storage.clone().with_few_retries();
    let path =
        |wanted: &CheckpointRef| layout::manifest_path(&store.of(wanted).trial_path, &wanted.name);
    let manifests: Vec<String> = refs.iter().take(MANIFESTS_MAX).map(path).collect();
    run_blocking(rt, &first.name, async move {
        for manifest in manifests {
            if storage.get(&manifest).await.is_ok() {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// Runs a future on the background runtime and blocks until its result. `name` is that of the
/// checkpoint, for the error if the runtime is shut down.
pub(crate) fn run_blocking<T: Send + 'static>(
    rt: &Handle,
    name: &str,
    act: impl Future<Output = Result<T, CheckpointError>> + Send + 'static,
) -> Result<T, CheckpointError> {
    let (sender, receiver) = sync_channel(1);
    rt.spawn(async move {
        let _ = sender.send(act.await);
    });
    receiver.recv().unwrap_or(Err(CheckpointError::ShutDown { name: name.to_owned() }))
}
