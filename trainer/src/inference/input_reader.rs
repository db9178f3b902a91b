//! Reads the rows of a worker's shards and verifies that the input is unchanged.

use std::ops::Range;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use stoker_api::inference::{PlanFile, PlanShard, RowFormat, ShardPlan};
use stoker_storage::hash::sha256_hex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::rows::{Row, lines, records};
use super::source::Source;
#[cfg(feature = "parquet")]
use super::table_reader::TableReader;
use super::{infrastructure, remedy};
use crate::context::Context;
use crate::{InvalidInput, Result};

/// Input of a worker.
pub(super) struct InputReader<'a> {
    context: &'a Context,
    plan: &'a ShardPlan,
    source: Source,
    rt: Handle,
    /// Shard that is being read before it is needed, by its index.
    next: Option<(u32, Prefetch)>,
    /// Last input file in a format without byte ranges, by its index in the plan.
    #[cfg(feature = "parquet")]
    table: Option<(u32, TableReader)>,
}

impl<'a> InputReader<'a> {
    pub(super) fn new(
        context: &'a Context,
        plan: &'a ShardPlan,
        source: Source,
        rt: Handle,
    ) -> Self {
        Self {
            context,
            plan,
            source,
            rt,
            next: None,
            #[cfg(feature = "parquet")]
            table: None,
        }
    }

    pub(super) fn is_local(&self) -> bool {
        self.source.is_local()
    }

    /// Returns the rows of a shard, in order.
    ///
    /// # Errors
    ///
    /// Fails if the input cannot be read, or has changed since the plan.
    pub(super) fn rows<T: DeserializeOwned>(
        &mut self,
        index: u32,
        planned: &PlanShard,
    ) -> Result<Vec<Row<T>>> {
        let file = &self.plan.files[planned.file as usize];
        let rows = match self.plan.input_format {
            RowFormat::JsonLines => lines(&self.bytes(index, planned)?, planned.start == 0),
            RowFormat::Csv => records(&self.bytes(index, planned)?, &file.columns),
            #[cfg(feature = "parquet")]
            format => {
                let table = self.table(planned.file, format)?;
                let rows = table.rows(planned.first_row, planned.rows);
                rows.map_err(|why| InvalidInput(format!("{}: {why}", file.name)))?
            }
            #[cfg(not(feature = "parquet"))]
            other => return Err(super::unsupported_format(other)),
        };
        if rows.len() != planned.rows as usize {
            let (actual, expected) = (rows.len(), planned.rows);
            let why =
                format!("shard {index} of {} has {actual} rows, planned {expected}", file.name);
            return Err(infrastructure(why));
        }
        Ok(rows)
    }

    /// Returns a file of a format without byte ranges. Consecutive shards of a file share it.
    #[cfg(feature = "parquet")]
    fn table(&mut self, file: u32, format: RowFormat) -> Result<&mut TableReader> {
        // Drop the previous file before reading this one: two may not fit in memory.
        let open = self.table.take().filter(|(open, _)| *open == file);
        let table = match open {
            Some((_, table)) => table,
            None => {
                let planned = &self.plan.files[file as usize];
                let bytes = self.rt.block_on(self.source.read(&planned.name, 0, planned.bytes))?;
                self.verify(planned, 0..planned.bytes, &bytes, &planned.sha256)?;
                let table = TableReader::open(format, bytes, self.plan.shard_rows);
                table.map_err(|why| InvalidInput(format!("{}: {why}", planned.name)))?
            }
        };
        Ok(&mut self.table.insert((file, table)).1)
    }

    /// Starts to read a shard in the background, if it has a byte range. Complete files are not
    /// read before they are needed: two of them may not fit in memory.
    pub(super) fn prefetch(&mut self, index: u32, planned: &PlanShard) {
        if !self.plan.input_format.is_typed() {
            let file = &self.plan.files[planned.file as usize];
            let read = self.rt.spawn(self.source.read(&file.name, planned.start, planned.end));
            self.next = Some((index, Prefetch(read)));
        }
    }

    /// Returns `true` if the prefetched shard was read.
    #[cfg(test)]
    pub(super) fn is_prefetched(&self) -> bool {
        self.next.as_ref().is_some_and(|(_, prefetch)| prefetch.0.is_finished())
    }

    /// Returns the bytes of a shard.
    fn bytes(&mut self, index: u32, planned: &PlanShard) -> Result<Bytes> {
        let file = &self.plan.files[planned.file as usize];
        let (start, end) = (planned.start, planned.end);
        let bytes = match self.next.take() {
            Some((next, mut prefetch)) if next == index => {
                let read = self.rt.block_on(&mut prefetch.0);
                let failed = |error| infrastructure(format!("cannot read {}: {error}", file.name));
                read.map_err(failed)??
            }
            _ => self.rt.block_on(self.source.read(&file.name, start, end))?,
        };
        self.verify(file, start..end, &bytes, &planned.sha256)?;
        Ok(bytes)
    }

    /// Verifies the hash of a range of a file.
    fn verify(
        &self,
        file: &PlanFile,
        range: Range<u64>,
        bytes: &Bytes,
        sha256: &str,
    ) -> Result<()> {
        if sha256_hex(bytes) == sha256 {
            return Ok(());
        }
        let why = format!(
            "input {}: bytes {} to {} are not what they were when the job began; {}",
            file.name,
            range.start,
            range.end,
            remedy::of_changed_input(self.context)
        );
        Err(InvalidInput(why).into())
    }
}

/// A read in the background. Dropping it cancels the read.
struct Prefetch(JoinHandle<Result<Bytes>>);

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.0.abort();
    }
}
