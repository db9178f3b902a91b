//! Bindings to the few NCCL functions in use, loaded from the installed library.
//!
//! Types and constants are those of `nccl.h`, which NVIDIA keeps stable across versions. They are
//! not taken from a crate. The existing crate does not look for `libnccl.so.2`, which NCCL's
//! packages install, and ends the process if it finds nothing.

// Reason: functions of a C library, which take device addresses.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};

/// File names of NCCL, as installed by its packages and its development packages.
const LIBRARY_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Minimum version, 2.14: the first with non-blocking calls.
const VERSION_MIN: c_int = 21_400;
/// Size of the ID by which ranks find each other.
pub(super) const ID_BYTES: usize = 128;
/// Timeout for the clean shutdown of a communicator.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of checks before a wait yields the processor.
const SPINS: u32 = 2_000;
const POLL_INTERVAL: Duration = Duration::from_micros(50);

const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
const OP_SUM: c_int = 0;

/// An error of NCCL or the CUDA driver.
#[derive(Clone, Debug)]
pub(super) struct NcclError {
    pub(super) why: String,
    /// Whether another rank caused the error.
    pub(super) is_remote: bool,
}

impl From<String> for NcclError {
    fn from(why: String) -> Self {
        Self { why, is_remote: false }
    }
}

type NcclResult<T> = Result<T, NcclError>;

/// Element type; the values are NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Element {
    F16 = 6,
    F32 = 7,
    Bf16 = 9,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; ID_BYTES]);

/// The fields of version 2.14; later versions recognize them by `size` and `version`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

type Comm = *mut c_void;

/// NCCL's functions.
struct Functions {
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int, *mut Config) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
}

/// The loaded library. It stays loaded until the process ends, because its own threads may still
/// run.
#[derive(Clone, Copy)]
pub(super) struct Library {
    functions: &'static Functions,
    version: c_int,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Library {
    /// Loads the installed library.
    ///
    /// # Errors
    ///
    /// Fails if the library is missing or too old.
    pub(super) fn open() -> Result<Self, String> {
        // SAFETY: when loaded, NCCL only initializes its own memory.
        let opened =
            LIBRARY_NAMES.iter().find_map(|name| unsafe { libloading::Library::new(*name) }.ok());
        let names = LIBRARY_NAMES.join(" or ");
        let missing =
            format!("cannot load {names}; install NCCL or add its directory to LD_LIBRARY_PATH");
        let library: &'static _ = Box::leak(Box::new(opened.ok_or(missing)?));
        // SAFETY: the function types match nccl.h.
        unsafe {
            let get_version: unsafe extern "C" fn(*mut c_int) -> c_int =
                look_up(library, "ncclGetVersion")?;
            let mut version = 0;
            if get_version(&raw mut version) != SUCCESS || version < VERSION_MIN {
                return Err(format!(
                    "NCCL has version {version}, but must have {VERSION_MIN} or later"
                ));
            }
            let functions = Functions {
                get_unique_id: look_up(library, "ncclGetUniqueId")?,
                init: look_up(library, "ncclCommInitRankConfig")?,
                all_reduce: look_up(library, "ncclAllReduce")?,
                async_error: look_up(library, "ncclCommGetAsyncError")?,
                finalize: look_up(library, "ncclCommFinalize")?,
                destroy: look_up(library, "ncclCommDestroy")?,
                abort: look_up(library, "ncclCommAbort")?,
                error_string: look_up(library, "ncclGetErrorString")?,
                last_error: look_up(library, "ncclGetLastError")?,
            };
            Ok(Self { functions: Box::leak(Box::new(functions)), version })
        }
    }

    /// Returns the version in NCCL's encoding: 22703 is 2.27.3.
    pub(super) fn version(&self) -> i32 {
        self.version
    }

    /// Creates an ID by which ranks find each other.
    ///
    /// # Errors
    ///
    /// Fails if NCCL finds no network.
    pub(super) fn new_id(&self) -> NcclResult<[u8; ID_BYTES]> {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: `id` has the size of NCCL's ID.
        let code = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        self.checked(code, std::ptr::null_mut()).map(|()| id.0)
    }

    /// Converts the return code of a call.
    fn checked(&self, code: c_int, comm: Comm) -> NcclResult<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        let text = |message: *const c_char| {
            if message.is_null() {
                return String::new();
            }
            // SAFETY: NCCL's messages are null-terminated and live as long as the library.
            unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
        };
        // SAFETY: any code is valid, and NCCL accepts a null `comm`.
        let (summary, detail) = unsafe {
            (text((self.functions.error_string)(code)), text((self.functions.last_error)(comm)))
        };
        let why = if detail.is_empty() { summary } else { format!("{summary}: {detail}") };
        Err(NcclError { why, is_remote: code == REMOTE_ERROR })
    }
}

/// Looks up a function of the library.
///
/// # Safety
///
/// `F` must be the type of the function.
unsafe fn look_up<F: Copy>(library: &'static libloading::Library, name: &str) -> Result<F, String> {
    // SAFETY: guaranteed by the caller.
    let function = unsafe { library.get::<F>(name.as_bytes()) };
    function
        .map(|function| *function)
        .map_err(|error| format!("function {name} not found in NCCL: {error}"))
}

/// Fails if waiting should end, with the reason.
type CancelCheck<'a> = &'a dyn Fn() -> NcclResult<()>;

/// A CUDA stream of this process, in the context that burn uses, so that addresses are valid in
/// both.
#[derive(Clone, Debug)]
pub(super) struct GpuStream(Arc<CudaStream>);

impl GpuStream {
    /// Creates a separate stream.
    ///
    /// # Errors
    ///
    /// Fails if the GPU cannot be used.
    pub(super) fn new(gpu: usize) -> NcclResult<Self> {
        let driver = |error: DriverError| NcclError::from(format!("GPU {gpu}: {error}"));
        let context = CudaContext::new(gpu).map_err(driver)?;
        Ok(Self(context.new_stream().map_err(driver)?))
    }

    /// Binds the context to this thread, because NCCL's calls use the current context.
    fn bind(&self) -> NcclResult<()> {
        self.0.context().bind_to_thread().map_err(|error| error.to_string().into())
    }
}

/// One rank in NCCL. Its calls are non-blocking, so that the exit of another rank is noticed.
pub(super) struct Communicator {
    library: Library,
    comm: Comm,
    stream: GpuStream,
    /// Whether the communicator must be aborted instead of shut down cleanly.
    has_failed: bool,
}

// SAFETY: NCCL allows calls from any thread, one at a time, which `&mut self` guarantees.
unsafe impl Send for Communicator {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { library, has_failed, .. } = self;
        f.debug_struct("Communicator")
            .field("library", library)
            .field("has_failed", has_failed)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// Waits until all ranks have joined. NCCL itself would wait forever, so `cancel_check`
    /// limits the wait.
    ///
    /// # Errors
    ///
    /// Fails if a rank cannot join, or if `cancel_check` does.
    pub(super) fn join(
        library: Library,
        id: [u8; ID_BYTES],
        rank: usize,
        size: usize,
        stream: GpuStream,
        cancel_check: CancelCheck<'_>,
    ) -> NcclResult<Self> {
        stream.bind()?;
        let mut joined = Self { library, comm: std::ptr::null_mut(), stream, has_failed: false };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN as u32,
            blocking: 0,
        };
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: all pointers are valid until the call returns.
        let code = unsafe {
            (library.functions.init)(&raw mut joined.comm, size, Id(id), rank, &raw mut config)
        };
        let outcome =
            library.checked(code, joined.comm).and_then(|()| joined.wait_until_ready(cancel_check));
        joined.note_failure(outcome)?;
        Ok(joined)
    }

    /// All-reduces `num` elements from device address `from` to device address `to`, and waits for
    /// the result. Both may be equal. Nothing else may access either range meanwhile.
    ///
    /// # Errors
    ///
    /// Fails if another rank exited, or the GPU failed.
    pub(super) fn sum(
        &mut self,
        from: u64,
        to: u64,
        num: usize,
        element: Element,
        cancel_check: CancelCheck<'_>,
    ) -> NcclResult<()> {
        if num == 0 {
            return Ok(());
        }
        self.stream.bind()?;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        let stream = self.stream.0.cu_stream().cast();
        // SAFETY: the caller holds allocations with this many elements at these addresses, and has
        // waited for all kernels that use them. NCCL allows equal addresses.
        let code = unsafe {
            let all_reduce = self.library.functions.all_reduce;
            all_reduce(from, to, num, element as c_int, OP_SUM, self.comm, stream)
        };
        let queued = self
            .library
            .checked(code, self.comm)
            .and_then(|()| self.wait_until_ready(cancel_check));
        self.note_failure(queued)?;
        let driver = |error: DriverError| NcclError::from(error.to_string());
        let done = self.stream.0.record_event(None).map_err(driver);
        let done = done
            .and_then(|event| self.wait(cancel_check, &|| event.try_is_complete().map_err(driver)));
        self.note_failure(done)
    }

    /// Marks the gang as failed, so that dropping this value aborts instead of waiting for others.
    pub(super) fn mark_failed(&mut self) {
        self.has_failed = true;
    }

    /// Waits until NCCL has accepted the queued operation.
    fn wait_until_ready(&self, cancel_check: CancelCheck<'_>) -> NcclResult<()> {
        self.wait(cancel_check, &|| Ok(self.state()? == SUCCESS))
    }

    /// Waits for a condition; fails if NCCL reports an error or `cancel_check` does.
    fn wait(
        &self,
        cancel_check: CancelCheck<'_>,
        is_done: &dyn Fn() -> NcclResult<bool>,
    ) -> NcclResult<()> {
        for round in 0_u32.. {
            if is_done()? {
                break;
            }
            if round < SPINS {
                std::hint::spin_loop();
                continue;
            }
            self.state()?;
            cancel_check()?;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the asynchronous state, which includes errors of NCCL's threads and of other ranks.
    fn state(&self) -> NcclResult<c_int> {
        let mut state = SUCCESS;
        // SAFETY: `comm` is open.
        let code = unsafe { (self.library.functions.async_error)(self.comm, &raw mut state) };
        self.library.checked(code, self.comm)?;
        self.library.checked(state, self.comm)?;
        Ok(state)
    }

    fn note_failure<T>(&mut self, outcome: NcclResult<T>) -> NcclResult<T> {
        self.has_failed |= outcome.is_err();
        outcome
    }

    fn finalize(&mut self) -> NcclResult<()> {
        self.stream.bind()?;
        // SAFETY: `comm` is open, and no operation follows this call.
        let code = unsafe { (self.library.functions.finalize)(self.comm) };
        self.library.checked(code, self.comm)?;
        let start = Instant::now();
        self.wait_until_ready(&|| match start.elapsed() < SHUTDOWN_TIMEOUT {
            true => Ok(()),
            false => Err("timeout while waiting for the other ranks".to_owned().into()),
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.comm.is_null() {
            return;
        }
        let is_over = !self.has_failed && self.finalize().is_ok();
        let Functions { destroy, abort, .. } = self.library.functions;
        // SAFETY: `comm` is open; aborting ends pending operations.
        unsafe { if is_over { destroy(self.comm) } else { abort(self.comm) } };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without NCCL, the error names the remedy. With NCCL but without a GPU, IDs can be created.
    #[test]
    fn missing_nccl_is_reported() {
        match Library::open() {
            Err(why) => assert!(why.contains("libnccl.so.2") || why.contains("version"), "{why}"),
            Ok(library) => {
                assert!(library.version() >= VERSION_MIN);
                assert_ne!(library.new_id().unwrap(), [0; ID_BYTES]);
                let refused = library.checked(4, std::ptr::null_mut()).unwrap_err();
                assert!(refused.why.contains("invalid argument"), "{refused:?}");
                assert!(!refused.is_remote);
                assert!(library.checked(REMOTE_ERROR, std::ptr::null_mut()).unwrap_err().is_remote);
            }
        }
    }
}
