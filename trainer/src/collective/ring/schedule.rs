//! Schedule of an all-reduce: the bytes that a rank may send and receive next.

use std::ops::Range;

/// Progress of the parts around the ring: round `k + 1` sends what round `k` received.
#[derive(Debug)]
pub(super) struct RingProgress {
    rank: usize,
    size: usize,
    /// Start of each part in bytes, then the end of the last.
    bounds: Vec<usize>,
    /// Next byte to send: round, and offset in its part.
    send: (usize, usize),
    /// Next byte to receive: round, and offset in its part.
    receive: (usize, usize),
    /// Number of bytes of an incomplete element.
    pub(super) partial_bytes: usize,
}

impl RingProgress {
    /// Divides a head of `head_bytes` and `len` elements into parts. The first part contains the
    /// head: the ranks add to it in rank order.
    pub(super) fn new(
        rank: usize,
        size: usize,
        head_bytes: usize,
        len: usize,
        element_bytes: usize,
    ) -> Self {
        let end = |part| head_bytes + part * len / size * element_bytes;
        let bounds = std::iter::once(0).chain((1..=size).map(end)).collect();
        let mut schedule =
            Self { rank, size, bounds, send: (0, 0), receive: (0, 0), partial_bytes: 0 };
        schedule.advance();
        schedule
    }

    fn num_rounds(&self) -> usize {
        2 * (self.size - 1)
    }

    /// Returns the byte range of the part that `rank` sends in round `round`.
    fn part(&self, rank: usize, round: usize) -> Range<usize> {
        let part = (rank + 2 * self.size - round % self.size) % self.size;
        self.bounds[part]..self.bounds[part + 1]
    }

    /// Returns the bytes that can be sent now, if any.
    pub(super) fn sendable(&self) -> Option<Range<usize>> {
        let (round, at) = self.send;
        if round == self.num_rounds() {
            return None;
        }
        let part = self.part(self.rank, round);
        let available_end = match round.checked_sub(1) {
            // The part of this round was received in the round before.
            Some(previous_round) if previous_round == self.receive.0 => part.start + self.receive.1,
            Some(previous_round) if previous_round > self.receive.0 => part.start,
            _ => part.end,
        };
        let start = part.start + at;
        (start < available_end).then_some(start..available_end)
    }

    pub(super) fn sent(&mut self, num: usize) {
        self.send.1 += num;
        self.advance();
    }

    /// Returns the bytes that remain to be received in this round.
    pub(super) fn receivable(&self) -> Option<Range<usize>> {
        let (round, at) = self.receive;
        if round == self.num_rounds() {
            return None;
        }
        let part = self.part(self.rank + self.size - 1, round);
        Some(part.start + at..part.end)
    }

    pub(super) fn received(&mut self, num: usize) {
        self.receive.1 += num;
        self.advance();
    }

    /// Returns `true` in the first pass, in which received values are added.
    pub(super) fn is_adding(&self) -> bool {
        self.receive.0 < self.size - 1
    }

    /// Advances past completed turns and empty parts.
    fn advance(&mut self) {
        while self.send.0 < self.num_rounds()
            && self.part(self.rank, self.send.0).len() == self.send.1
        {
            self.send = (self.send.0 + 1, 0);
        }
        while self.receivable().is_some_and(|range| range.is_empty()) {
            self.receive = (self.receive.0 + 1, 0);
        }
    }

    pub(super) fn has_received(&self) -> bool {
        self.receive.0 == self.num_rounds()
    }

    pub(super) fn has_sent(&self) -> bool {
        self.send.0 == self.num_rounds()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.has_received() && self.has_sent()
    }
}
