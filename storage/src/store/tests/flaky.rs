//! Store that fails, is slow, or loses responses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::multipart::PartId;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload,
    ObjectMeta, PutMultipartOptions, PutOptions, PutResult, Result,
};

use super::*;

/// Store that fails every n-th operation before it has an effect.
#[derive(Debug)]
pub(super) struct Flaky {
    pub(super) inner: InMemory,
    every: u64,
    pub(super) count: AtomicU64,
    kind: std::io::ErrorKind,
    pub(super) link: Option<Link>,
    /// End of an outage, in which all operations fail at once.
    up_at: Option<Instant>,
    completions: Completions,
    num_completions: AtomicU64,
}

/// Behavior of completions of uploads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Completions {
    /// They succeed.
    Reliable,
    /// The first one has an effect, but its response is lost. The next ones do not find the upload.
    LostAfter,
    /// The first one is lost. The next ones do not find the upload.
    LostBefore,
    /// None finds the upload.
    Unknown,
}

/// Link that all requests share. A request that takes 180 seconds times out.
#[derive(Debug)]
pub(super) struct Link {
    bytes_per_second: u64,
    in_flight: AtomicU64,
    pub(super) timeouts: AtomicU64,
}

impl Link {
    async fn transfer(&self, bytes: u64) -> Result<()> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let (mut rest, mut seconds) = (bytes, 0);
        while rest > 0 && seconds < 180 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            seconds += 1;
            let share = self.bytes_per_second / self.in_flight.load(Ordering::Relaxed);
            rest = rest.saturating_sub(share);
        }
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if rest == 0 {
            return Ok(());
        }
        self.timeouts.fetch_add(1, Ordering::Relaxed);
        Err(Error::Generic { store: "Link", source: "operation timed out".into() })
    }
}

impl fmt::Display for Flaky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Flaky")
    }
}

impl Flaky {
    pub(super) fn new(every: u64, kind: std::io::ErrorKind) -> Arc<Self> {
        Arc::new(Self::with(every, kind))
    }

    fn with(every: u64, kind: std::io::ErrorKind) -> Self {
        let [count, num_completions] = [(); 2].map(|()| AtomicU64::new(0));
        let completions = Completions::Reliable;
        let inner = InMemory::new();
        let (link, up_at) = (None, None);
        Self { inner, every, count, kind, link, up_at, completions, num_completions }
    }

    pub(super) fn completing(completions: Completions) -> Arc<Self> {
        let store = Self::with(u64::MAX, std::io::ErrorKind::ConnectionReset);
        Arc::new(Self { completions, ..store })
    }

    pub(super) fn behind(bytes_per_second: u64) -> Arc<Self> {
        let [in_flight, timeouts] = [(); 2].map(|()| AtomicU64::new(0));
        let link = Some(Link { bytes_per_second, in_flight, timeouts });
        Arc::new(Self { link, ..Self::with(u64::MAX, std::io::ErrorKind::Other) })
    }

    pub(super) fn down_for(seconds: u64) -> Arc<Self> {
        let up_at = Some(Instant::now() + Duration::from_secs(seconds));
        let store = Self::with(u64::MAX, std::io::ErrorKind::ConnectionRefused);
        Arc::new(Self { up_at, ..store })
    }

    fn tick(&self) -> Result<()> {
        if self.up_at.is_some_and(|up_at| Instant::now() < up_at) {
            return Err(self.error());
        }
        match (self.count.fetch_add(1, Ordering::Relaxed) + 1) % self.every {
            0 => Err(self.error()),
            _ => Ok(()),
        }
    }

    fn error(&self) -> Error {
        Error::Generic { store: "Flaky", source: Box::new(std::io::Error::from(self.kind)) }
    }
}

#[async_trait::async_trait]
impl ObjectStore for Flaky {
    async fn put_opts(&self, at: &Path, bytes: PutPayload, how: PutOptions) -> Result<PutResult> {
        self.tick()?;
        if let Some(link) = &self.link {
            link.transfer(bytes.content_length() as u64).await?;
        }
        self.inner.put_opts(at, bytes, how).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, how).await
    }

    async fn get_opts(&self, at: &Path, how: GetOptions) -> Result<GetResult> {
        self.tick()?;
        let is_head = how.head;
        let got = self.inner.get_opts(at, how).await?;
        if let Some(link) = self.link.as_ref().filter(|_| !is_head) {
            link.transfer(got.range.end - got.range.start).await?;
        }
        Ok(got)
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.tick() {
            Ok(()) => self.inner.delete_stream(paths),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.tick() {
            Ok(()) => self.inner.list(prefix),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.tick()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, how: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, how).await
    }
}

#[async_trait::async_trait]
impl MultipartStore for Flaky {
    async fn create_multipart(&self, at: &Path) -> Result<MultipartId> {
        self.tick()?;
        self.inner.create_multipart(at).await
    }

    async fn put_part(
        &self,
        at: &Path,
        id: &MultipartId,
        idx: usize,
        bytes: PutPayload,
    ) -> Result<PartId> {
        self.tick()?;
        if let Some(link) = &self.link {
            link.transfer(bytes.content_length() as u64).await?;
        }
        self.inner.put_part(at, id, idx, bytes).await
    }

    async fn complete_multipart(
        &self,
        at: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        self.tick()?;
        if self.completions == Completions::Reliable {
            return self.inner.complete_multipart(at, id, parts).await;
        }
        let is_first = self.num_completions.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first && self.completions == Completions::LostAfter {
            self.inner.complete_multipart(at, id, parts).await?;
        }
        match is_first && self.completions != Completions::Unknown {
            true => Err(self.error()),
            false => Err(Error::NotFound { path: at.to_string(), source: "NoSuchUpload".into() }),
        }
    }

    async fn abort_multipart(&self, at: &Path, id: &MultipartId) -> Result<()> {
        self.inner.abort_multipart(at, id).await
    }
}
