//! `stoker run --ui`: the page beside a run, on separate threads.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use stoker_ui::{Site, Store};

use super::stored::StoredRuns;
use super::{THREADS, address, listen, local, local_actions, root_argument};
use crate::failure::Failure;
use crate::run_root::RunRoot;

/// Starts the page on a port, and returns its URL. The page ends with the process.
///
/// # Errors
///
/// The port is in use.
pub(crate) fn start(
    run_root: &RunRoot,
    port: u16,
    allows_actions: bool,
) -> Result<String, Failure> {
    let actions = local_actions::access(Some(run_root.root.clone()), allows_actions)?;
    let run_root = run_root.clone();
    let (sender, receiver) = sync_channel(1);
    // The runner has one thread, which a viewer must not delay.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = sender.send(Err(Failure::System(format!("cannot start a page: {error}"))));
                return;
            }
        };
        runtime.block_on(async move {
            let opened = async {
                let (listener, access) = listen(port, "--ui=PORT").await?;
                let url = format!("http://{}/?token={}", address(&listener)?, access.token);
                Ok((listener, access, url))
            };
            let (listener, access) = match opened.await {
                Ok((listener, access, url)) => {
                    let _ = sender.send(Ok(url));
                    (listener, access)
                }
                Err(error) => {
                    let _ = sender.send(Err(error));
                    return;
                }
            };
            let store = Arc::new(Store::default());
            let site = Site {
                place: format!("Local runs in {}", run_root.root),
                arguments: root_argument(&run_root),
                actions: Some(Arc::new(actions)),
                ..Site::default()
            };
            local::start(run_root, store.clone(), StoredRuns::default());
            stoker_ui::serve(listener, store, site, access, std::future::pending()).await;
        });
    });
    let ended = || Failure::System("cannot start a page: its thread ended".to_owned());
    receiver.recv().map_err(|_| ended())?
}
