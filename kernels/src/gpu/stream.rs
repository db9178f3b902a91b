//! Work on the CUDA streams of burn.

use std::ffi::c_void;

use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::cubecl::device_handle::DeviceHandle;
use burn_cubecl::cubecl::server::{BufferBinding, Handle, ServerError, ServerStorage};
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_server::runtime::Runtime;
use cubecl_server::stream::{ExecuteScope, WriteScoped, failed_writing};

type CudaServer = <CudaRuntime as Runtime>::Server;

/// A CUDA stream of burn, whose context is current, with the index of its GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// A `CUstream`.
    pub(super) address: *mut c_void,
    /// Index of the GPU among the visible ones.
    pub(super) gpu: u16,
}

/// Runs `work` in the thread in which burn queues its kernels, after all kernels that this thread
/// has queued so far, and before all later ones.
///
/// `work` gets the stream of these kernels, and the device addresses of the buffers. What it queues
/// on the stream is then in order with burn's kernels. If it fails, reading a written buffer
/// reports the error.
pub(super) fn on_stream<W>(client: &Client, written: Vec<Handle>, read: Vec<Handle>, work: W)
where
    W: FnOnce(Stream, &[u64], &[u64]) -> Result<(), String> + Send + 'static,
{
    let service = client.service_id();
    let device = DeviceHandle::<CudaServer>::new(service.device);
    let gpu = service.device.index_id;
    let bindings = |handles: Vec<Handle>| -> Vec<BufferBinding> {
        handles.into_iter().map(Handle::binding).collect()
    };
    let (written, read, current) = (bindings(written), bindings(read), StreamId::current());
    device.submit(move |server: &mut CudaServer| {
        let mut memory = vec![];
        for binding in written.iter().chain(&read) {
            match server.get_resource(binding.clone(), current) {
                Ok(resource) => memory.push(resource),
                // An input is missing because earlier work failed, or memory is exhausted.
                Err(error) => return failed_writing(server, current, written, error),
            }
        }
        let addresses: Vec<u64> = memory.iter().map(|memory| memory.resource().ptr).collect();
        let num_written = written.len();
        let _ = ExecuteScope::over(server, current, written.clone()).execute(|server| {
            let stream = server.write_streams().try_stream_mut(&current);
            let stream = stream.ok_or_else(|| failure("burn has no stream".into()))?;
            let stream = Stream { address: stream.sys.cast(), gpu };
            let (written, read) = addresses.split_at(num_written);
            work(stream, written, read).map_err(failure)
        });
        // The memory of another stream must stay reserved until this work is done. burn releases
        // it at an event after its last use, so use it again after the work.
        for binding in written.into_iter().chain(read) {
            if binding.stream != current {
                let _ = server.get_resource(binding, current);
            }
        }
    });
}

/// Calls a function in the thread in which burn queues its kernels, with a current CUDA context and
/// the index of the GPU. Waits for the result.
pub(super) fn ask<T: Send>(client: &Client, call: impl FnOnce(u16) -> T + Send) -> Option<T> {
    let service = client.service_id();
    let device = DeviceHandle::<CudaServer>::new(service.device);
    device.submit_blocking(move |_| call(service.device.index_id)).ok()
}

fn failure(reason: String) -> ServerError {
    ServerError::Generic { reason, backtrace: BackTrace::capture() }
}
