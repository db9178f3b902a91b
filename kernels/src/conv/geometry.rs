//! Sizes of a convolution, and of the matrices that compute it.

use burn::tensor::ops::ConvOptions;

use crate::machine::Threads;
use crate::window::Axis;

/// Sizes of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) batch: usize,
    pub(super) groups: usize,
    pub(super) channels_in: usize,
    pub(super) channels_out: usize,
    pub(super) height: Axis,
    pub(super) width: Axis,
}

impl Geometry {
    /// Returns `None` if the shapes do not fit, or a size other than the batch is 0.
    pub(super) fn new(
        [batch, channels_in, height, width]: [usize; 4],
        [channels_out, channels_group, kernel_height, kernel_width]: [usize; 4],
        options: &ConvOptions<2>,
    ) -> Option<Self> {
        let ConvOptions { stride, padding, dilation, groups } = options;
        let axis = |index: usize, len, kernel| {
            Axis::new(len, kernel, stride[index], dilation[index], padding[index])
        };
        let height = axis(0, height, kernel_height)?;
        let width = axis(1, width, kernel_width)?;
        let fits = *groups > 0
            && channels_group * groups == channels_in
            && channels_out % groups == 0
            && channels_in > 0
            && channels_out > 0;
        let groups = *groups;
        fits.then_some(Self { batch, groups, channels_in, channels_out, height, width })
    }

    pub(super) fn shape_out(&self) -> [usize; 4] {
        [self.batch, self.channels_out, self.height.num_windows, self.width.num_windows]
    }

    /// Number of values of an image of the input.
    pub(super) fn image_in(&self) -> usize {
        self.channels_in * self.height.len * self.width.len
    }

    /// Number of windows of an image.
    pub(super) fn num_windows(&self) -> usize {
        self.height.num_windows * self.width.num_windows
    }

    /// Number of values of an image of the output.
    pub(super) fn image_out(&self) -> usize {
        self.channels_out * self.num_windows()
    }

    /// Number of weights of an output channel, and of values of a window.
    pub(super) fn window(&self) -> usize {
        self.channels_in / self.groups * self.height.kernel * self.width.kernel
    }

    /// Number of output channels of a group.
    pub(super) fn group_out(&self) -> usize {
        self.channels_out / self.groups
    }

    /// Multiplications of the forward pass.
    pub(super) fn num_products(&self) -> usize {
        self.batch * self.image_out() * self.window()
    }

    /// Threads of each product: all of them if a single image leaves no other parallelism.
    pub(super) fn threads(&self) -> Threads {
        if self.batch == 1 { Threads::All } else { Threads::One }
    }

    /// Channel, row and column of each weight of a kernel with `channels` channels.
    pub(super) fn taps(&self, channels: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (height, width) = (self.height.kernel, self.width.kernel);
        (0..channels)
            .flat_map(move |c| (0..height).flat_map(move |y| (0..width).map(move |x| (c, y, x))))
    }
}
