"""A plan as one HTML page, which opens without a network.

Charts are drawn with d3 (https://d3js.org, 7.9.0, ISC licence), which lies in `assets`
and is written into each page: 0.28 MB. It gives scales, axes, zooming and stacking, and
leaves what is drawn to us, in SVG that follows the page's colours, or on a canvas where
there are as many marks as actions of a schedule. plotly's script is 4.7 MB, bokeh's 1
MB with pandas behind it, and neither has charts of layers and ops, meshes or schedules.
"""
